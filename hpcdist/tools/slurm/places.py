"""Find the job templates and cluster profiles that come with hpcdist."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdist.errors import ConfigError


def sites() -> list[str]:
    return sorted(path.stem for path in folder("sites").glob("*.toml"))


def folder(kind: str) -> Path:
    """Return the folder `templates` or `sites`, next to the package in a checkout, or among a wheel's data files."""
    package = Path(__file__).parents[2]
    prefixes = [*package.parents, Path(sys.prefix)]
    candidates = [package.parent / "slurm", *(prefix / "share" / "hpcdist" / "slurm" for prefix in prefixes)]
    for candidate in candidates:
        if (candidate / kind).is_dir():
            return candidate / kind
    raise ConfigError(
        f"slurm/{kind} must be next to the package or in share/hpcdist/slurm; got neither for {package}. Reinstall "
        "hpcdist."
    )
