"""Common parts of the strategies for Trainer and Fabric: ranks, devices, collective calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from hpcdist import strategies
from hpcdist.errors import ConfigError
from hpcdist.lightning.environment import HpcdistEnvironment
from hpcdist.session import DistributedOptimizer, allgather, allreduce, barrier, broadcast, init, local_rank, local_size
from hpcdist.session.world import current


class CollectivesMixin:
    """A mix-in for Lightning's strategies: ranks, devices, and collective calls by hpcdist."""

    parallel_devices: Any
    cluster_environment: Any

    def _join(self, strategy: str, clip_norm: float | None, options: dict[str, Any]) -> None:
        """Collective. Join the ranks, and determine the workers, which come first in Lightning's order."""
        self._name, self.clip_norm, self._options = strategy, clip_norm, options
        # This rank is a server, and follows the workers through an epoch that they have finished, without their calls.
        self.idle = False
        self.strategy_class = strategies.load(strategy)
        if self.strategy_class.contract.batch == "portions":
            raise ConfigError(
                f"strategy must compute gradients of whole batches with Lightning; got {strategy}, whose workers "
                "compute portions of a joint batch. Use another one, or your own training loop."
            )
        size = init().size
        self._workers = workers = self.strategy_class.Config.from_mapping(options, "strategy").workers(size)
        self.cluster_environment = HpcdistEnvironment(sorted(range(size), key=lambda rank: rank not in workers))
        self.serves, self.some_serve = init().rank not in workers, len(workers) < size  # this rank; some rank

    def set_world_ranks(self) -> None:
        """Set the rank in Lightning's logging, and check the number of devices that the user requests."""
        rank_zero_only.rank = self.cluster_environment.global_rank()  # type: ignore[attr-defined]
        devices, ranks = self.parallel_devices or [], local_size()
        on_gpus = bool(devices) and devices[0].type == "cuda"
        fits = len(devices) >= min(ranks, torch.cuda.device_count()) if on_gpus else len(devices) in (0, 1, ranks)
        if not fits:
            raise ConfigError(
                f"devices must be 'auto', or the number of ranks on this node, {ranks}, which mpirun or srun has "
                f"started; got {len(devices)}. Remove it, or start that number of ranks."
            )

    _set_world_ranks = set_world_ranks  # Fabric's name

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[local_rank() % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """Return None: hpcdist.shard distributes samples, and Lightning adds no sampler."""

    # --- collective calls of all ranks; inside an epoch with servers, of the workers ----------------------------------
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Collective. Return the mean (sum, min, max) of a tensor over the ranks; other values unchanged."""
        if not isinstance(tensor, Tensor) or self.idle:
            return tensor
        op = str(reduce_op).rpartition(".")[2].lower()
        op = {"avg": "mean"}.get(op, op)  # Lightning's name, and hpcdist's
        integer = op == "mean" and not (tensor.is_floating_point() or tensor.is_complex())
        return allreduce(tensor.double() if integer else tensor, op)  # type: ignore[arg-type]

    all_reduce = reduce  # Fabric's name

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Collective. Stack the ranks' tensors along a new first dimension, in Lightning's order of ranks.

        Args:
            sync_grads: propagate gradients back to the tensors of all ranks.
        """
        if sync_grads and not self.idle:
            return _Gather.apply(tensor, self)
        return torch.stack(self.gathered(tensor))

    def gathered(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Collective. Return the tensors of all ranks, whose shapes may differ, in Lightning's order of ranks."""
        if self.idle:
            return [tensor]
        # In a tuple, because `allgather` would concatenate tensors.
        tensors = [each.to(tensor.device) for (each,) in allgather((tensor.detach().cpu(),))]
        return tensors if current().group is not None else [tensors[rank] for rank in self.cluster_environment.order]

    def barrier(self, *_: Any, **__: Any) -> None:
        """Collective. Wait for all ranks."""
        if not self.idle:
            barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Collective. Return the object of Lightning's rank `src`."""
        return obj if self.idle else broadcast(obj, self.cluster_environment.order[src])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Collective. Return whether `decision` is true on all ranks, or on any."""
        return bool(self.reduce(torch.tensor(int(decision)), reduce_op="min" if all else "max"))

    # --- the model ----------------------------------------------------------------------------------------------------
    def _distribute(self, optimizers: Sequence[Any], model: nn.Module, clip_norm: float | None) -> None:
        """Collective. Make each optimiser train its part of the model with the other ranks."""
        for optimizer in optimizers:
            DistributedOptimizer(optimizer, model, self._name, clip_norm=clip_norm, **self._options)

    def _share_metrics(self, model: nn.Module) -> None:
        """Let the model's torchmetrics gather their states over all ranks, by calls of hpcdist."""
        if current().comm.size == 1:
            return
        for module in model.modules():
            if isinstance(module, Metric):
                module.distributed_available_fn = lambda: True
                module.dist_sync_fn = self._states
            # Metrics whose states are equal after the first batch share one; that may differ by rank.
            if isinstance(module, MetricCollection) and module._enable_compute_groups is True:
                module._enable_compute_groups = module._groups_checked

    def _states(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Collective. Return a metric's state on all ranks; scalars are expanded if other ranks have vectors."""
        states = self.gathered(state)
        shape = max(states, key=Tensor.dim).shape
        return [each.expand(shape) if each.dim() == 0 else each for each in states]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of this rank's optimiser."""
        plain = getattr(optimizer, "optimizer", optimizer)  # of Lightning's wrapper
        return plain.attachment.local_state_dict() if hasattr(plain, "attachment") else plain.state_dict()

    get_optimizer_state = optimizer_state  # Fabric's name

    @staticmethod
    def _require_shares(loader: object) -> None:
        """Raise ConfigError if an evaluation has no sample for some rank."""
        size = current().comm.size
        sized = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
        if sized and 0 < len(loader.dataset) < size:  # type: ignore[union-attr,attr-defined,arg-type]
            raise ConfigError(
                f"data of an evaluation must have a sample for each of {size} ranks, which log the same values; got "
                f"{len(loader.dataset)}. Use fewer ranks, or more samples."  # type: ignore[union-attr,attr-defined,arg-type]
            )


@contextmanager
def accumulate_locally(optimizers: Sequence[Any]) -> Iterator[None]:
    """Let backward passes in the context only accumulate this rank's gradients."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield


def clone_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


class _Gather(torch.autograd.Function):
    """Stack the tensors of all ranks; the gradient of a tensor is the sum of all ranks' gradients of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: CollectivesMixin) -> Tensor:
        tensors = ranks.gathered(tensor)
        ctx.index = ranks.cluster_environment.global_rank()  # workers come first
        return torch.stack(tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return allreduce(gradient, "sum")[ctx.index], None
