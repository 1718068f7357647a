"""Find the templates of jobs and the profiles of clusters that come with hpcdist."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdist.errors import ConfigError


def sites() -> list[str]:
    """List the names of the profiles that come with hpcdist, sorted."""
    return sorted(path.stem for path in folder("sites").glob("*.toml"))


def folder(kind: str) -> Path:
    """Find the folder `templates` or `sites`: beside the package in a checkout, else where a wheel puts its data.

    Raises:
        ConfigError: it is in neither place.
    """
    package = Path(__file__).parents[2]
    prefixes = [*package.parents, Path(sys.prefix)]
    places = [package.parent / "slurm", *(prefix / "share" / "hpcdist" / "slurm" for prefix in prefixes)]
    for place in places:
        if (place / kind).is_dir():
            return place / kind
    raise ConfigError(
        f"slurm/{kind} must be beside the package or in share/hpcdist/slurm; got neither by {package}. Install hpcdist "
        "again."
    )
