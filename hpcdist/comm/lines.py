"""The line of the user's code at which a thread is, for messages."""

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
    """Find a thread's innermost line of the user's code, as `file:line in function: source`.

    Neither this package's lines count nor a library's. A job that `hpcdist train` runs may have no line of its own
    there: then it is the innermost line of the training loop.

    Args:
        thread: its identifier, as of `threading.get_ident`.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    outside = [entry for entry in stack if not entry.filename.startswith(_PACKAGE)]
    users = [entry for entry in outside if not _is_library(entry.filename)]
    commands = [entry for entry in stack if entry.filename.startswith(_COMMANDS)]
    shown = users or commands or outside
    return f"{shown[-1].filename}:{shown[-1].lineno} in {shown[-1].name}: {shown[-1].line}" if shown else AT_THE_END


def _is_library(file: str) -> bool:
    """Tell whether a file is of the standard library, an installed package, or a program that a package installed."""
    parts = file.split(os.sep)
    return file.startswith(("<frozen ", *_folders())) or "site-packages" in parts or "dist-packages" in parts


@cache
def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({path + os.sep for folder in folders for path in (folder, os.path.realpath(folder))})
