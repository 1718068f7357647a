"""End all ranks after an uncaught exception on one of them, and show its traceback first.

Otherwise the other ranks would wait for the failed one until somebody cancels the job.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable

from hpcdist import log
from hpcdist.errors import HpcdistError
from hpcdist.faults.reporter import is_reporter


def install(rank: int, abort: Callable[[int], None], advice: Callable[[BaseException], str] = lambda error: "") -> None:
    """Set sys.excepthook: show an uncaught exception with `rank` before each line, then call `abort(status)`.

    Args:
        abort: a function that ends every rank of the job with a non-zero exit status.
        advice: returns a possible cause of an exception that is not one of this package.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace) -> None:
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)  # such as a debugger's or a notebook's
        if is_reporter(rank):
            lines = traceback.format_exception(kind, error, trace)
            lines += [] if issubclass(kind, HpcdistError) else [advice(error)]
            text = "".join(f"[rank {rank}] {line}\n" for line in "".join(lines).splitlines())
            message = f"rank {rank} ends the job by an uncaught exception."
            log.before_end(message, text=text, exc_info=(kind, error, trace))
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            sys.__stderr__.write(sys.stderr.getvalue())  # torch.distributed's hook buffers it until this one returns
            sys.__stderr__.flush()
        abort(1)

    sys.excepthook = hook
