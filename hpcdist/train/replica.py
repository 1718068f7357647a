"""A replica of the model: the ranks that jointly hold it, and how they compute a batch."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator
from hpcdist.config.job import JobConfig
from hpcdist.data.hdf5 import COLUMNS
from hpcdist.errors import ConfigError, RankFailedError
from hpcdist.model.flat import FlatModel
from hpcdist.parallel.grid import Grid
from hpcdist.parallel.pipeline import Pipeline
from hpcdist.records import digest
from hpcdist.records.digest import tensor_bytes
from hpcdist.session.misfit import named_misfits, require_labels
from hpcdist.train.job import Job, JobData
from hpcdist.train.numerics import Precision

CHUNK = 1 << 20  # elements of a message


class JobReplica(abc.ABC):
    """This rank's part of a replica of the model."""

    module: nn.Module  # this rank's layers
    others: Communicator  # the ranks with the same layers, one per replica; its rank numbers are replica numbers
    grid: Grid | None = None  # stages and replicas; None if each rank has a whole model
    cut: tuple[int, ...] = ()  # the numbers of layers of the stages; empty if each rank has a whole model
    columns: tuple[str, ...] = COLUMNS  # the data that this rank reads: x on the first stage, y on the last one

    @abc.abstractmethod
    def backward(self, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        """Add the gradients of a batch; return its mean loss, a float64 scalar. Collective in the replica."""

    @abc.abstractmethod
    def digest(self, model: FlatModel, params: Sequence[Tensor]) -> str:
        """Return the sha256 of the whole model's parameters. Collective in the replica."""

    def require_whole(self, lost: Sequence[int]) -> None:
        """Raise RankFailedError if a rank has failed that its replica needs."""

    def close(self) -> None:
        """Collective. Release communicators."""


class WholeReplica(JobReplica):
    """A replica on one rank."""

    def __init__(self, job: Job, config: JobConfig, comm: Communicator, device: torch.device, precision: Precision):
        self._job, self._config, self.others, self._precision = job, config, comm, precision
        self.module = job.model(**config.model).to(device)
        self.unchecked: dict[str, JobData] = {}  # data sets by split, until their labels are compared with outputs

    def backward(self, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        self.others.compute()
        size = self._config.batch_size
        *before, last = zip(x.split(size), y.split(size), strict=True)
        total = x.new_zeros((), dtype=torch.float64)
        for part in before:
            with optimizer.no_sync():
                total += self.backward_part(*part, len(x))
        return total + self.backward_part(*last, len(x))

    def backward_part(self, x: Tensor, y: Tensor, samples: int) -> Tensor:
        """Add the gradients of a part of a batch of `samples` samples; return its share of the mean loss."""
        named = named_misfits(self._config.data.path, "train", self.module, x=x, y=y)
        with self.others.trace.span("forward", "compute"), self._precision.autocast(), named as at:
            at["outputs"] = self.module(x)
            while self.unchecked:
                split, data = self.unchecked.popitem()
                labels, path = data.stored_labels(), self._config.data.path
                require_labels(self._job.loss, at["outputs"], labels, path=path, split=split)
            loss = self._job.loss(at["outputs"], y)
        if len(x) != samples:
            loss = loss * (len(x) / samples)
        with self.others.trace.span("backward", "compute"):
            self._precision.scaler.scale(loss).backward()
        return loss.detach()

    def digest(self, model: FlatModel, params: Sequence[Tensor]) -> str:
        return digest(params)


class StagedReplica(JobReplica):
    """Collective. A replica whose layers are on several ranks of a grid, as a pipeline.

    With `accumulation` a batch has more micro-batches of the same size, so that the pipeline fills and empties only
    once per step.
    """

    module: Pipeline
    grid: Grid

    def __init__(self, job: Job, config: JobConfig, comm: Communicator, device: torch.device, precision: Precision):
        settings = config.parallel
        self._precision, self._path = precision, config.data.path
        self._batch_size, self._micro_batches = config.batch_size, settings.micro_batches
        self.grid = Grid(comm, settings.stages, settings.spread)
        self.others = self.grid.outer
        self.module = Pipeline(
            lambda: job.model(**config.model), lambda outputs, targets: job.loss(outputs, targets), self.grid,
            cut=settings.sizes, micro_batches=settings.micro_batches * config.accumulation, device=device,
            schedule=settings.schedule, chunks=settings.chunks, recompute=settings.recompute,
            routing=settings.routing, seed=config.seed,
        )  # fmt: skip
        _require_parameters(comm, self.module)
        self.cut = self.module.cut.sizes
        self.columns = ("x",) * self.module.is_first + ("y",) * self.module.is_last

    def backward(self, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        # A smaller batch has fewer micro-batches: batch norm refuses those of one sample.
        how: dict[str, Any] = {"micro_batches": -(-len(x) * self._micro_batches // self._batch_size)}
        if self._precision.scaler.is_enabled():
            how["scaled"] = self._precision.scaler.scale
        used = {"x": x if self.module.is_first else None, "y": y if self.module.is_last else None}
        with self._precision.autocast(), named_misfits(self._path, "train", self.module, **used):
            return self.module.forward_backward(x, y, **how)

    def digest(self, model: FlatModel, params: Sequence[Tensor]) -> str:
        """Return the sha256 that `records.digest` has for the whole model's flat tensors. Collective in the replica.

        All ranks iterate over all chunks, in the order of the whole model; each sends its own to the first rank.
        """
        inner, sha, pipeline = self.grid.inner, hashlib.sha256(), self.module
        repeated = set(map(id, pipeline.tied.repeated))  # the whole model has them in the first stage
        layer_numbers = [number for stage in pipeline.stages for number in pipeline.cut.layers(stage)]
        layer_of = dict(zip((name for name, _ in pipeline.named_children()), layer_numbers, strict=True))
        local = [
            (layer_of[slot.name.partition(".")[0]], str(params[slot.group].dtype), slot.start, slot.stop)
            for slot in model.slots
            if id(slot.tensor) not in repeated
        ]
        parts = [(*part, rank) for rank, parts in enumerate(inner.gather(local)) for part in parts]
        parts.sort(key=lambda part: part[0])  # by layer, as in a whole model's flat tensors; stable
        groups = {str(flat.dtype): flat for flat in params}
        for dtype in dict.fromkeys(part[1] for part in parts):
            of_group = [part for part in parts if part[1] == dtype]
            sha.update(f"{dtype} ({sum(stop - start for _, _, start, stop, _ in of_group)},);".encode())
            for _, _, start, stop, rank in of_group:
                for first in range(start, stop, CHUNK):
                    chunk = groups[dtype][first : min(first + CHUNK, stop)] if inner.rank == rank else None
                    sha.update(self._collected(chunk, rank, min(CHUNK, stop - first), dtype))
        return inner.gather(sha.hexdigest())[0]

    def _collected(self, chunk: Tensor | None, rank: int, length: int, dtype: str) -> Any:
        """Return a chunk of a rank's parameters on the first rank of the replica, and b"" on the others."""
        inner = self.grid.inner
        if chunk is not None:  # of this rank
            if rank == 0:
                return tensor_bytes(chunk)
            inner.isend(chunk, 0).wait()
        elif inner.rank == 0:
            received = torch.empty(length, dtype=getattr(torch, dtype.removeprefix("torch.")))
            inner.irecv(received, rank).wait()
            return tensor_bytes(received)
        return b""

    def require_whole(self, lost: Sequence[int]) -> None:
        for rank in lost:
            replica, stage = divmod(rank, self.grid.stages)
            raise RankFailedError(
                f"rank {rank}, stage {stage} of replica {replica}, has failed, and the model's other stages can't "
                "continue without it. Resume from the last checkpoint, on the remaining number of ranks."
            )

    def close(self) -> None:
        self.module.close()
        self.grid.close()


def _require_parameters(comm: Communicator, pipeline: Pipeline) -> None:
    """Collective. Raise ConfigError if a rank has no parameters to train."""
    trains = comm.gather(any(parameter.requires_grad for parameter in pipeline.parameters()))
    if not all(trains):
        raise ConfigError(
            f"parallel.cut must give each rank a layer with parameters to train; got {pipeline.cut}, with which rank "
            f"{trains.index(False)} has none. Set it by hand: numbers of layers, such as parallel.cut = [4, 3]."
        )
