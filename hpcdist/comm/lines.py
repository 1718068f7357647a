"""Find the line of the user's code that a thread is executing, for messages."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import traceback
from functools import cache

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMANDS = tuple(f"{_PACKAGE}{part}{os.sep}" for part in ("train", "tools"))  # that run a user's command
AT_THE_END = "the end of its script"


def line_of(thread: int) -> str:
    """Return a thread's innermost line of the user's code, as `file:line in function: source`.

    Lines of this package and of libraries are skipped. If the stack has no line of the user's (a job of
    `hpcdist train`), it is the innermost line of the training loop.

    Args:
        thread: its identifier, from `threading.get_ident`.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    outside = [entry for entry in stack if not entry.filename.startswith(_PACKAGE)]
    users = [entry for entry in outside if not _is_library(entry.filename)]
    commands = [entry for entry in stack if entry.filename.startswith(_COMMANDS)]
    frames = users or commands or outside
    return (
        f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else AT_THE_END
    )


def _is_library(file: str) -> bool:
    """Return whether a file belongs to the standard library or an installed package."""
    parts = file.split(os.sep)
    return file.startswith(("<frozen ", *_folders())) or "site-packages" in parts or "dist-packages" in parts


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages, also with links resolved."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({path + os.sep for folder in folders for path in (folder, os.path.realpath(folder))})
