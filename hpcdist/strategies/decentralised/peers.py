"""The peers of a strategy without servers: surviving ranks, random sampling, transfers, half precision, means.

The run continues without a rank that fails, if the launcher keeps the others alive (`mpirun --with-ft ulfm`). Each rank
detects a failure separately, so ranks may know of it from different steps on. Local decisions use the ranks in
`Peers.present`; random choices and sums that must be equal on all ranks use `comm.failures.alive`, which changes only
when all ranks shrink the group.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hpcdist import compress
from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.transfer import WIDE
from hpcdist.compress import CompressionConfig
from hpcdist.compress.fp16 import Cast
from hpcdist.config.settings import Field, joint_rule
from hpcdist.errors import ConfigError, RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.records import Recorder
from hpcdist.strategies.common.state import State


class SamplingConfig(Strategy.Config):
    """Options of strategies that sample random ranks."""

    seed: int = Field(0, "seed of the random choice of peers, sampled from (seed, rank)", ge=0)

    def generator(self, comm: Communicator, state: State) -> torch.Generator:
        """Create this rank's generator, which checkpoints save."""
        return state.rng("peers", self.seed * 1_000_003 + comm.rank)


class WireConfig(Strategy.Config):
    """Options of strategies whose ranks send parameters, not differences."""

    compression: CompressionConfig = Field(CompressionConfig(), "fp16 or bf16: send parameters in half precision")

    @joint_rule
    def _stands_for_itself(self) -> None:
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


class Peers:
    """Tracks surviving ranks, and runs transfers that tolerate a failure of the other rank.

    Args:
        records: the strategy's recorder; a record names each failed rank.
    """

    def __init__(self, comm: Communicator, records: Recorder):
        self._comm = comm
        self._named: set[int] = set()  # failed ranks in records
        records.events = self._name_lost

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are not known to have failed. Never waits."""
        dead, alive = self._comm.failures.failed(), self._comm.failures.alive
        return tuple(rank for rank in alive if rank not in dead) if dead else alive

    def _name_lost(self) -> list[str]:
        """Return an event for each rank found to have failed since the last call."""
        lost = set(range(self._comm.size)).difference(self.present, self._named)
        self._named |= lost
        return [f"goes on without rank {rank}: it has died" for rank in sorted(lost)]

    def survives(self, transfer: Callable[..., object], *args: Any) -> bool:
        """Make a transfer with another rank; return False if that rank has failed (the transfer may be incomplete)."""
        try:
            transfer(*args)
        except RankFailedError:
            return False
        return True

    def exchange(self, sent: Sequence[Tensor], dest: int, received: Sequence[Tensor], source: int) -> bool:
        """Send tensors to `dest` while receiving from `source`; return whether all tensors were received.

        If one of the two ranks fails, the transfer with the other completes. If False, `received` must not be used.
        """
        arriving: list[Request] = []
        leaving: list[Request] = []
        started = [self.survives(lambda t=t: arriving.append(self._comm.irecv(t, source))) for t in received]
        for tensor in sent:
            self.survives(lambda t=tensor: leaving.append(self._comm.isend(t, dest)))
        completed = [self.survives(request.wait) for request in arriving]
        for request in leaving:
            self.survives(request.wait)
        return all(started) and all(completed)


class Wire:
    """Rounds parameters to the dtype of messages."""

    def __init__(self, config: CompressionConfig, params: Sequence[Tensor], state: State):
        cast = compress.load(config.name) if config else None
        self._params, self._packed = params, list[Tensor]()
        if cast is not None and issubclass(cast, Cast):
            self._packed = state.scratch([torch.empty_like(p, dtype=cast.dtype) for p in params])

    def empty(self) -> list[Tensor]:
        """Return new flat tensors on the host to receive messages in."""
        return [torch.empty_like(flat, device="cpu") for flat in self._packed or self._params]

    def pack(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the message: `params`, or rounded copies that are valid until the next call."""
        for packed, flat in zip(self._packed, params):
            limit = torch.finfo(packed.dtype).max
            packed.copy_(flat.detach().clamp(-limit, limit))
        return self._packed or params


class Gossip(Strategy):
    """Base of strategies that average parameters with random ranks, before or after the local step.

    With `order = "before"` the gradient is computed at the parameters before averaging, as in D-PSGD; the local
    optimiser then steps from the averaged parameters.
    """

    class Config(WireConfig):
        interval: int = Field(1, "steps between averages", ge=1)
        order: Literal["after", "before"] = Field("after", "average after the local step, or before it")
        include_self: bool = Field(True, "a rank may choose itself, as in the paper: then it does not average")

    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self.peers = Peers(comm, self.records)
        self.wire = Wire(config.compression, model.params, self.state)

    @abc.abstractmethod
    def mix(self, due: bool) -> None:
        """Average with other ranks; `due`: this step is one in `interval`."""

    def local_step(self, update: Update) -> Outcome:
        """Run the local optimiser."""
        return self.gradients.step_alone(update)

    def advance(self, update: Update) -> Outcome:
        due = (self.steps + 1) % self.config.interval == 0
        if self.config.order == "before":
            self.mix(due)
        outcome = self.local_step(update)
        if self.config.order == "after":
            self.mix(due)
        return outcome


def average_in(local: Sequence[Tensor], received: Sequence[Tensor], count: int, weight: int) -> None:
    """Set `local` to (weight · local + received)/(weight + count), a mean with the parameters of `count` other ranks.

    Args:
        local, received: flat tensors of the same lengths; `received` is the others' sum, of any dtype, on any device.
    """
    with torch.no_grad():
        for flat, others in zip(local, received, strict=True):
            for local_part, part in alongside(flat, others.to(flat.device, non_blocking=True)):
                sums = local_part.to(WIDE.get(local_part.dtype, local_part.dtype))  # a sum may overflow
                if weight > 1:
                    sums = sums.mul_(weight)
                local_part.copy_(sums.add_(part).div_(weight + count))


class PeerSampler:
    """Samples peers at random, as many as the option named `option` says.

    Raises:
        ConfigError: there are fewer ranks; a single rank accepts any number.
    """

    def __init__(self, comm: Communicator, peers: Peers, state: State, config: Any, option: str):
        self._rank, self._peers, self._count = comm.rank, peers, getattr(config, option)
        self._includes_self = config.include_self
        max_count = comm.size - (not config.include_self)
        if comm.size > 1 and self._count > max_count:
            raise ConfigError(
                f"strategy.{option} must be at most the number of ranks to draw from, {max_count}; got {self._count}. "
                "Draw fewer, or start more ranks."
            )
        self.generator = config.generator(comm, state)

    def sample(self) -> list[int]:
        """Sample distinct ranks uniformly from the surviving ranks; return all if there are fewer."""
        candidates = [rank for rank in self._peers.present if self._includes_self or rank != self._rank]
        return [
            candidates.pop(int(torch.randint(len(candidates), (), generator=self.generator)))
            for _ in range(min(self._count, len(candidates)))
        ]
