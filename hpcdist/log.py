"""Messages of the library: through `logging`, and on standard error unless the user has configured logging."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from typing import Any

PATIENCE_S = 2.0  # limit for the user's handlers when the process is about to end
_library = logging.getLogger("hpcdist")
line_is_open = False  # the terminal's last line is a progress bar; a message must start a new line


class _StandardError(logging.Handler):
    """Write messages to standard error unless the user has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_handled():
            write(f"hpcdist: {record.getMessage()}\n")


def set_up() -> None:
    """Print messages of level INFO and above on standard error, unless the user configures logging, before or later."""
    if not any(isinstance(handler, _StandardError) for handler in _library.handlers):
        _library.addHandler(_StandardError())
    if _library.level == logging.NOTSET:
        _library.setLevel(logging.INFO)


def is_handled() -> bool:
    """Return whether the user has a handler for messages: of the logger `hpcdist`, or of the root logger."""
    handlers = [*_library.handlers, *(logging.getLogger().handlers if _library.propagate else ())]
    return any(not isinstance(handler, _StandardError) for handler in handlers)


def before_end(message: str, *, text: str | None = None, **more: Any) -> None:
    """Report why this process is about to end the job: on standard error, and to the user's handlers.

    Always on standard error, because the logger may be muted. The handlers run in a separate thread with a time limit:
    the thread that hangs may hold a handler's lock, for example because the log's file system hangs.

    Args:
        message: the reason.
        text: text for standard error instead of the message; ends with a newline.
        more: arguments of the logger, such as `exc_info`.
    """
    write(f"hpcdist: {message}\n" if text is None else text)
    if is_handled():
        thread = threading.Thread(target=_library.error, args=(message,), kwargs=more, daemon=True)
        with suppress(RuntimeError):  # the interpreter is ending and starts no more threads
            thread.start()
            thread.join(PATIENCE_S)


def write(text: str) -> None:
    """Write to standard error, starting on a new line."""
    global line_is_open
    sys.stderr.write("\n" * line_is_open + text)
    line_is_open = False
    sys.stderr.flush()
