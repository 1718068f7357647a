"""Makes the small faults of mutations.toml in a copy of the library, one at a time, and names the tests that see each.

python tests/mutations.py [NAME...]; the first three tests are named. Where none sees a fault, the next step is a test
that would. A fault whose place has changed is refused: write it anew.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYTEST = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "--tb=no", "-rfE", "--maxfail=3"]


def main(names: list[str]) -> int:
    known = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())["mutation"]
    if unknown := set(names) - {one["name"] for one in known}:
        sys.exit(f"names must be those of mutations.toml; got {', '.join(sorted(unknown))}")
    unseen = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, ROOT.name)
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__"))
        for one in known:
            if not names or one["name"] in names:
                start = time.monotonic()
                seen = _seen_by(copy, one)
                unseen += not seen
                print(f"{one['name']} ({time.monotonic() - start:.0f} s): {', '.join(seen) or 'NO TEST'}", flush=True)
    return int(unseen > 0)


def _seen_by(copy: Path, one: dict) -> list[str]:
    """Make a fault in the copy, run the tests that are about it, and take it back; the first that failed."""
    place = copy / one["file"]
    whole = place.read_text()
    if whole.count(one["old"]) != 1:
        sys.exit(
            f"the text of {one['name']} must be in {one['file']} once; it is there {whole.count(one['old'])} times"
        )
    place.write_text(whole.replace(one["old"], one["new"]))
    paths = [path for pattern in one["tests"] for path in sorted(glob.glob(pattern, root_dir=copy))]
    ranks = one.get("ranks")
    command = ["mpirun", "-n", str(ranks)] if ranks else []
    command += [sys.executable, *PYTEST, *([] if ranks else ["-n", "2"]), *paths]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    finally:
        place.write_text(whole)
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return list(dict.fromkeys(found)) or ([] if done.returncode == 0 else [f"pytest ended with {done.returncode}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
