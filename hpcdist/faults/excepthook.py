"""An exception that nobody catches on one rank ends all ranks, after its traceback has been shown.

Without it the other ranks would wait for the failed one until somebody cancels the job.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable


def install(rank: int, abort: Callable[[int], None]) -> None:
    """Shows uncaught exceptions labelled with `rank`, then calls `abort(status)`.

    Args:
        abort: ends every rank of the job with a non-zero exit status.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace) -> None:
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)  # a debugger or a notebook wants to see it too
        # Where all ranks fail alike the lowest speaks and ends the job; the others would only repeat it.
        time.sleep(min(1.0 + 0.2 * rank, 3.0) if rank else 0.0)
        lines = traceback.format_exception(kind, error, trace)
        text = "".join(f"[rank {rank}] {line}\n" for line in "".join(lines).splitlines())
        print(text, end="", file=sys.stderr, flush=True)
        abort(1)

    sys.excepthook = hook
