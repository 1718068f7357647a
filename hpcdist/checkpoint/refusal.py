"""Errors with a checkpoint: an error on any rank becomes one CheckpointError on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CheckpointError, CommunicationError, HpcdistError

T = TypeVar("T")


def raise_on_all_ranks(comm: Communicator, work: Callable[[], T], rule: str = "") -> T:
    """Collective. Run `work` on every rank; return the result when `work` has succeeded on all ranks.

    Raises:
        CheckpointError: `work` has failed on some ranks; the message is `rule` and the reasons, the same on all ranks.
    """
    failure = None
    try:
        result = work()
    except CommunicationError:
        raise
    except Exception as error:  # of any type, because the other ranks wait for the result
        failure = error
    raised_elsewhere = isinstance(failure, HpcdistError) and failure.on_other_rank
    reasons = dict(enumerate(comm.gather("" if failure is None or raised_elsewhere else _reason(failure))))
    ranks_of: dict[str, list[int]] = {}
    for rank in comm.failures.alive:
        ranks_of.setdefault(reasons[rank], []).append(rank)
    succeeded = ranks_of.pop("", [])
    if not ranks_of:
        return result
    all_same = not succeeded and len(ranks_of) == 1
    prefix_of = {reason: "" if all_same else f"on rank {', '.join(map(str, of))}: " for reason, of in ranks_of.items()}
    raise CheckpointError(rule + " ".join(f"{prefix}{reason}" for reason, prefix in prefix_of.items())) from failure


def _reason(failure: Exception) -> str:
    if isinstance(failure, HpcdistError):
        return str(failure)
    if isinstance(failure, (FileExistsError, NotADirectoryError)):
        return f"{failure.filename}, which is a file. Name a folder."
    if isinstance(failure, OSError):
        return f"{failure}. Is there space, and may you read and write there?"
    return f"{type(failure).__name__}: {failure}."


@contextmanager
def understood(where: object, what: str = "what hpcdist has saved") -> Iterator[None]:
    """Convert errors of other types within the context into a CheckpointError: `where` must hold `what`.

    For code that reads the content of a file, which may be damaged, or written by another program.
    """
    try:
        yield
    except HpcdistError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where} must hold {what}; got something else ({type(error).__name__}: {error!s:.200}). "
            "Resume from another checkpoint."
        ) from None
