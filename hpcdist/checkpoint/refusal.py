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

    Args:
        rule: start of the error message.

    Raises:
        CheckpointError: `work` has failed on some ranks; the message lists the reasons, on all ranks.
    """
    failure = None
    try:
        result = work()
    except CommunicationError:
        raise
    except Exception as error:  # of any type, because the other ranks wait for the result
        failure = error
    elsewhere = isinstance(failure, HpcdistError) and failure.on_other_rank
    reasons = dict(enumerate(comm.gather("" if failure is None or elsewhere else _reason(failure))))
    ranks: dict[str, list[int]] = {}
    for rank in comm.failures.alive:
        ranks.setdefault(reasons[rank], []).append(rank)
    succeeded = ranks.pop("", [])
    if not ranks:
        return result
    everywhere = not succeeded and len(ranks) == 1
    where = {reason: "" if everywhere else f"on rank {', '.join(map(str, of))}: " for reason, of in ranks.items()}
    raise CheckpointError(rule + " ".join(f"{prefix}{reason}" for reason, prefix in where.items())) from failure


def _reason(failure: Exception) -> str:
    if isinstance(failure, HpcdistError):
        return str(failure)
    if isinstance(failure, OSError):
        return f"{failure}. Is there space, and may you read and write there?"
    return f"{type(failure).__name__}: {failure}."


@contextmanager
def understood(where: object, what: str = "what hpcdist has saved") -> Iterator[None]:
    """Convert any error about a file's content, which may have another origin, into a CheckpointError of one sentence.

    Raises:
        CheckpointError: an error of another type within the context.
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
