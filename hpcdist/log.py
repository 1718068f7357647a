"""Messages of the library: by `logging`, and on standard error unless the user has set up logging."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from typing import Any

PATIENCE_S = 2.0  # that the user's handlers have for a message of a process that is about to end
_library = logging.getLogger("hpcdist")
line_is_open = False  # the terminal's last line is a bar, at whose end a message would begin


class _StandardError(logging.Handler):
    """Write messages as the command line does, while nobody else handles them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_handled():
            write(f"hpcdist: {record.getMessage()}\n")


def set_up() -> None:
    """Show messages on standard error from the level INFO on, unless the user chooses otherwise, before or later."""
    if not any(isinstance(handler, _StandardError) for handler in _library.handlers):
        _library.addHandler(_StandardError())
    if _library.level == logging.NOTSET:
        _library.setLevel(logging.INFO)


def is_handled() -> bool:
    """Tell whether messages go to a handler of the user's: of `hpcdist`, or of all loggers."""
    handlers = [*_library.handlers, *(logging.getLogger().handlers if _library.propagate else ())]
    return any(not isinstance(handler, _StandardError) for handler in handlers)


def before_end(message: str, *, shown: str | None = None, **more: Any) -> None:
    """Say why this process is about to end the job: on standard error, and to the user's handlers.

    On standard error always: the logger may be muted (by its level, by a configuration that disables the loggers it
    does not name), and nobody would learn why the job ended. To handlers from a thread of its own, for which this one
    waits only so long: the thread that hangs may hold a handler's lock, as where the log's file system hangs.

    Args:
        shown: the text for standard error, where it isn't the message; it ends with a newline.
        more: for the logger, such as `exc_info`.
    """
    write(f"hpcdist: {message}\n" if shown is None else shown)
    if is_handled():
        teller = threading.Thread(target=_library.error, args=(message,), kwargs=more, daemon=True)
        with suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
            teller.start()
            teller.join(PATIENCE_S)


def write(text: str) -> None:
    """Write to standard error, on a line of its own."""
    global line_is_open
    sys.stderr.write("\n" * line_is_open + text)
    line_is_open = False
    sys.stderr.flush()
