"""Show an uncaught exception once, and end all ranks after it.

Otherwise the other ranks would wait for the failed one until somebody cancels the job.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpcdist import log
from hpcdist.errors import CommunicationError, HpcdistError, place
from hpcdist.faults.reporter import is_reporter


def install(
    rank: int | None, abort: Callable[[int], None], advice: Callable[[BaseException], str] = lambda error: ""
) -> None:
    """Set sys.excepthook: show an uncaught exception with `rank` before each line, then call `abort(status)`.

    An error of this package is one line, which names the script's line. Other exceptions are shown with a traceback; so
    are errors of communication, as it matters what the ranks were doing.

    Args:
        rank: this rank; None if it is the only one: then the process ends by itself, with status 1.
        abort: a function that ends every rank of the job with a non-zero exit status.
        advice: returns a possible cause of an exception that is not one of this package.
    """
    previous = getattr(sys.excepthook, "previous", sys.excepthook)  # an earlier hook of this function is replaced

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_one_line = isinstance(error, HpcdistError) and not isinstance(error, CommunicationError)
        if previous is not sys.__excepthook__ or (rank is None and not is_one_line):
            previous(kind, error, trace)  # a debugger's, a notebook's; on a single rank Python's
            if rank is None:
                if not is_one_line and (hint := advice(error)):
                    sys.stderr.write(f"{hint}\n")
                return
        if rank is None or is_reporter(rank):
            lines = traceback.format_exception(kind, error, trace)
            lines += [] if isinstance(error, HpcdistError) else [advice(error)]
            if is_one_line:
                lines = [f"hpcdist: error: {error}{place(error)}"]
            label = "" if rank is None else f"[rank {rank}] "
            text = "".join(f"{label}{line}\n" for line in "".join(lines).splitlines())
            message = f"rank {rank or 0} ends the job by an uncaught exception."
            log.before_end(message, text=text, exc_info=(kind, error, trace))
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            sys.__stderr__.write(sys.stderr.getvalue())  # torch.distributed's hook buffers it until this one returns
            sys.__stderr__.flush()
        if rank is not None:
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()  # os._exit would not
            abort(1)

    hook.previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook
