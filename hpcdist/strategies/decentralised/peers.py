"""Deal with the other ranks of a strategy without servers: who lives, random draws, transfers, half precision, means.

All ranks are alike, and the others go on without one that dies. That needs a launcher that lets them live, `mpirun
--with-ft ulfm`. A rank finds out about a death by itself, so different ranks may know of it from different steps on.
Decisions of one rank go by the ranks that are `present`; draws and sums that must be equal on all ranks go by
`comm.failures.alive`, which changes where all ranks shrink the group together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist import compress
from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.transfer import WIDE
from hpcdist.compress import CompressionConfig
from hpcdist.compress.fp16 import Cast
from hpcdist.errors import ConfigError, RankFailedError
from hpcdist.strategies.base import Strategy
from hpcdist.strategies.common.records import Recorder
from hpcdist.strategies.common.state import State


class PeersConfig(Strategy.Config):
    """Options of strategies that go on without a rank that dies, whichever rank it is."""

    def needed(self, size: int) -> tuple[int, ...]:
        return ()


class SamplingConfig(PeersConfig):
    """Options of random draws of ranks."""

    seed: int = Field(0, ge=0, description="seed of the random choice of peers; each rank draws from (seed, rank)")


class WireConfig(Strategy.Config):
    """Options of strategies whose ranks send their parameters themselves."""

    compression: CompressionConfig = Field(
        CompressionConfig(), description="fp16 or bf16: parameters travel in half precision"
    )

    @model_validator(mode="after")
    def _stands_for_itself(self):
        chosen = self.compression
        if chosen and not issubclass(compress.load(chosen.name), Cast):
            raise ValueError(
                "strategy.compression must be none, fp16 or bf16 where ranks send their parameters to others that "
                f"remember nothing of them; got {chosen.name}. For other compressors take dpsgd, local_sgd or strom."
            )
        if chosen.warmup_steps or not chosen.error_feedback:
            raise ValueError(
                "strategy.compression must be without warmup_steps and error_feedback = false where parameters travel "
                f"in half precision; got {chosen.warmup_steps} and {chosen.error_feedback}. Leave them out."
            )
        return self


class MixingConfig(WireConfig, PeersConfig):
    """Options of strategies that mix a rank's parameters with those of others drawn at random.

    Steps count from 1. With `order = "before"` the gradient is still that at the parameters of before the mixing, as
    in D-PSGD; the local optimiser then steps from the mixed ones.
    """

    _former: ClassVar = {"draw_self": "include_self"}
    interval: int = Field(1, ge=1, description="steps between averages")
    order: Literal["after", "before"] = Field("after", description="average after the local step, or before it")
    include_self: bool = Field(True, description="a rank may choose itself, as in the paper: then it does not average")

    def mixes(self, step: int, order: str) -> bool:
        """Tell whether to mix in that step, "before" or "after" the local optimiser's step."""
        return order == self.order and step % self.interval == 0


class Peers:
    """Know which ranks live, and make transfers that outlive the rank at the other end.

    Args:
        records: of the strategy; one of them names each rank that has died.
    """

    def __init__(self, comm: Communicator, records: Recorder):
        self._comm = comm
        self._named: set[int] = set()  # in a record
        records.events = self._name_lost

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are not known to have died. Never waits."""
        dead, alive = self._comm.failures.failed(), self._comm.failures.alive
        return tuple(rank for rank in alive if rank not in dead) if dead else alive

    def _name_lost(self) -> list[str]:
        lost = set(range(self._comm.size)).difference(self.present, self._named)
        self._named |= lost
        return [f"goes on without rank {rank}: it has died" for rank in sorted(lost)]

    def survives(self, transfer: Callable[..., object], *args) -> bool:
        """Make a transfer with another rank; return False if that one has died, and the transfer may be half done."""
        try:
            transfer(*args)
        except RankFailedError:
            return False
        return True

    def exchange(self, sent: Sequence[Tensor], dest: int, received: Sequence[Tensor], source: int) -> bool:
        """Send tensors to `dest` while receiving others from `source`; return True if all of those have come.

        If one of the two dies, the transfer with the other is still made. Tensors received in part must not be used.
        """
        arriving: list[Request] = []
        leaving: list[Request] = []
        requests = [self.survives(lambda t=t: arriving.append(self._comm.irecv(t, source))) for t in received]
        for tensor in sent:
            self.survives(lambda t=tensor: leaving.append(self._comm.isend(t, dest)))
        come = [self.survives(request.wait) for request in arriving]
        for request in leaving:
            self.survives(request.wait)
        return all(requests) and all(come)


class Wire:
    """Round parameters to the type in which they are sent."""

    def __init__(self, config: CompressionConfig, params: Sequence[Tensor], state: State):
        cast = compress.load(config.name) if config else None
        self._params, self._packed = params, list[Tensor]()
        if cast is not None and issubclass(cast, Cast):
            self._packed = state.scratch([torch.empty_like(p, dtype=cast.dtype) for p in params])

    def empty(self) -> list[Tensor]:
        """Return new flat tensors of the lengths and the type in which parameters are sent, on the host."""
        return [torch.empty_like(flat, device="cpu") for flat in self._packed or self._params]

    def pack(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the message: `params` themselves, or rounded copies that are valid until the next call."""
        for packed, own in zip(self._packed, params):
            most = torch.finfo(packed.dtype).max
            packed.copy_(own.detach().clamp(-most, most))
        return self._packed or params


def average_in(own: Sequence[Tensor], total: Sequence[Tensor], count: int, weight: int) -> None:
    """Average the own parameters, which count `weight` times, with those of `count` others, in place.

    Args:
        own, total: flat tensors of the same lengths; `total` is the others' sum, of any type and on any device.
    """
    with torch.no_grad():
        for params, others in zip(own, total, strict=True):
            for mine, theirs in alongside(params, others.to(params.device, non_blocking=True)):
                wide = mine.to(WIDE.get(mine.dtype, mine.dtype))  # the sum may be beyond the range of its mean
                if weight > 1:
                    wide = wide.mul_(weight)
                mine.copy_(wide.add_(theirs).div_(weight + count))


class PeerSampler:
    """Samples peers at random. Each rank has its own generator, which checkpoints save."""

    def __init__(self, comm: Communicator, peers: Peers, state: State, seed: int):
        self._rank, self._peers = comm.rank, peers
        self.generator = state.rng("peers", seed * 1_000_003 + comm.rank)

    def sample(self, count: int = 1, *, include_self: bool = True) -> list[int]:
        """Sample `count` distinct ranks uniformly from those present; if there are fewer, return all of them.

        Args:
            include_self: this rank may be among them.
        """
        left = [rank for rank in self._peers.present if include_self or rank != self._rank]
        return [
            left.pop(int(torch.randint(len(left), (), generator=self.generator))) for _ in range(min(count, len(left)))
        ]


def check_count(comm: Communicator, name: str, count: int, *, include_self: bool) -> None:
    """Check that there are `count` ranks to draw; on one rank, which mixes with nobody, any count will do.

    Raises:
        ConfigError: `count`, the option of that name, is greater.
    """
    most = comm.size - (not include_self)
    if comm.size > 1 and count > most:
        raise ConfigError(
            f"strategy.{name} must be at most the number of ranks to draw from, {most}; got {count}. Draw fewer, "
            "or start more ranks."
        )
