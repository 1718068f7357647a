"""Models of DTensors: this rank's parts of the parameters, as plain tensors in the same memory; device meshes.

With torch's `fully_shard` (FSDP2) and `parallelize_module` (tensor parallelism) the ranks of a replica hold parameters
jointly: DTensors. A strategy averages, sends and compresses plain tensors: the rank's part, which it exchanges with the
ranks that hold the same part in other replicas. In DistributedDataParallel each rank's part is all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.parallel.agreement import Agreement, PartOfModel
from hpcdist.parallel.grid import Grid
from hpcdist.torch_backend.default_group import host_backend, start_default_group, started_for

_DEVICE_TYPES = ("cpu", "cuda")
_WHOLE = {"ranks": 0, "dims": []}  # all ranks have the same, and the first one's counts


class Shards(PartOfModel):
    """Collective. This rank's parts of a model's parameters and its buffers, named like "shard0of2.layer.weight".

    A part is a DTensor's local shard, with FSDP's padding, or a parameter that the ranks replicate. It lies in the
    model's memory: whatever changes one changes the other. When the parts are moved (into flat memory, to the consensus
    of all replicas and back), the DTensors follow before the model's next forward pass. Give this to the optimiser and
    to `DistributedOptimizer`; run the model itself, forward and backward.

    A backward pass leaves its gradients here, as `.grad` of the parts, and none in the model; the optimiser's
    `zero_grad` resets them. If a gradient is not finite on one rank, it is not finite on all ranks of the replica.

    Parameters that all ranks of a replica hold whole, such as norms under tensor parallelism, are copied from the first
    rank after each step, because gossip may have mixed them with different replicas. Messages: one broadcast in the
    replica for all of them.

    Args:
        model: on its device; fully_shard or parallelize_module has been called on it already. Or one that
            DistributedDataParallel wraps, on the replica's ranks, which then train on different samples.
        grid: its ranks `inner` jointly hold the model.

    Raises:
        ConfigError: the model has no DTensor, or fully_shard has omitted a parameter; or DistributedDataParallel is
            on other ranks.
    """

    def __init__(self, model: nn.Module, grid: Grid):
        super().__init__()
        self.grid, self.optimizers = grid, []
        self._models = (model,)  # in a tuple: no submodule, for its parameters are not to be trained as they are
        model = self._inside
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        parameters = dict(model.named_parameters())
        _check(parameters, self._ddp, bool(self._sharded), grid)
        self._meshes = list(dict.fromkeys(p.device_mesh for p in parameters.values() if isinstance(p, DTensor)))
        self._parts: dict[str, _OwnShard] = {}
        for name, parameter in parameters.items():
            path, _, key = name.rpartition(".")
            part = _OwnShard(model.get_submodule(path), key, parameter, by_fsdp=bool(self._sharded))
            self._parts[name] = part
            self._home(path).register_parameter(key, part.own)
        for path, module in model.named_modules():
            if module._buffers:  # the same dictionary, for a module may replace its buffers
                home: Any = self._home(path)
                home._buffers, home.normalises = module._buffers, isinstance(module, _NormBase)  # for FlatBuffers
        repeated = [part.own for part in self._parts.values() if any(g.rank() > 0 for g in self._holders(part))]
        self.agreement = Agreement(grid.inner.split(0), repeated)
        self._arrived: dict[_OwnShard, Tensor] = {}  # gradients of the current backward pass, until `_deliver`
        for part in self._parts.values():
            if part.own.requires_grad:
                part.tensor.register_post_accumulate_grad_hook(self._hook(part))
        self._models[0].register_forward_pre_hook(lambda *_: self._start_forward(), prepend=True)
        model.register_state_dict_pre_hook(lambda *_: self._follow())

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        (model,) = self._models
        return model if isinstance(model, DistributedDataParallel) else None

    @property
    def _inside(self) -> nn.Module:
        """The model, without DistributedDataParallel around it."""
        return self._models[0] if self._ddp is None else self._ddp.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._models[0](*args, **kwargs)

    def _home(self, path: str) -> nn.Module:
        """Return the submodule for the parts of the model's module at `path`; create it if it is missing."""
        home: nn.Module = self  # names start with the rank's position, so that a checkpoint can't confuse ranks' parts
        for name in [f"shard{self.grid.stage}of{self.grid.stages}", *(path.split(".") if path else ())]:
            if name not in home._modules:
                home.add_module(name, nn.Module())
            home = home.get_submodule(name)
        return home

    def describe_parts(self) -> dict[str, dict[str, Any]]:
        prefix = f"shard{self.grid.stage}of{self.grid.stages}."
        described = {prefix + name: part.describe(name) for name, part in self._parts.items()}
        buffers = self._inside.named_buffers()
        return described | {prefix + name: {**_WHOLE, "of": name, "shape": list(t.shape)} for name, t in buffers}

    # --- values ---------------------------------------------------------------------------------------------------
    def _start_forward(self) -> None:
        self._arrived.clear()  # left by a backward pass that has failed
        self._follow()
        for name, part in self._parts.items():
            part.check(name)

    def _reshard(self) -> None:
        """Free whole parameters that a forward pass without a backward pass has left, which may be old."""
        for module in self._sharded:
            module.reshard()

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the DTensors to the memory of their parts, if these have been moved."""
        self._reshard()
        moved = [part for part in self._parts.values() if part.moved]
        for part in moved:
            part.follow()
        if moved and self._sharded:
            self._models[0].load_state_dict({}, strict=False)  # FSDP then looks up its parameters' memory again
        for part in moved:
            part.trim()  # last: FSDP would copy tensors without padding

    @torch.no_grad()
    def share_values(self) -> None:
        self._follow()
        groups: dict[tuple[Any, torch.dtype], list[Tensor]] = {}
        for part in self._parts.values():
            for group in self._holders(part):
                groups.setdefault((group, part.own.dtype), []).append(part.own.detach())
        for (group, _), tensors in groups.items():
            joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(joined, dist.get_global_rank(group, 0), group=group)
            for tensor, values in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
                if not torch.equal(tensor, values.view_as(tensor)):  # a strategy may be sending this memory
                    tensor.copy_(values.view_as(tensor))

    def _holders(self, part: _OwnShard) -> list[Any]:
        """Return groups of ranks with the same part: one per mesh dimension that replicates it, equal on its ranks."""
        if self._ddp is not None:
            return [self._ddp.process_group] if self.grid.stages > 1 else []
        if not isinstance(part.tensor, DTensor):
            return [mesh.get_group(i) for mesh in self._meshes[:1] for i in range(mesh.ndim) if mesh.size(i) > 1]
        mesh, placements = part.tensor.device_mesh, part.tensor.placements
        return [mesh.get_group(i) for i, p in enumerate(placements) if p.is_replicate() and mesh.size(i) > 1]

    # --- gradients ------------------------------------------------------------------------------------------------
    def _hook(self, part: _OwnShard) -> Any:
        """Return the hook that collects a parameter's gradients until the end of the backward pass."""

        def arrive(tensor: Tensor) -> None:
            if self._ddp is not None and not self._ddp.require_backward_grad_sync:  # in no_sync: they add up
                return
            if not self._arrived:
                # Not `_deliver` yet: FSDP's callback, with the last gradients, may follow this one, and DDP's.
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: engine.queue_callback(self._deliver))
            if self._ddp is not None:
                self._arrived[part] = tensor  # until DDP has averaged it
                return
            grad, earlier = part.take_gradient(), self._arrived.get(part)
            self._arrived[part] = grad if earlier is None else earlier + grad

        return arrive

    def _deliver(self) -> None:
        """Collective in the replica. Set the parts' gradients by another backward pass, so that their hooks run."""
        arrived, self._arrived = self._arrived, {}
        if self._ddp is not None:  # also what other ranks alone have used; copies, as DDP's buckets are used again
            used = (part for part in self._parts.values() if part.tensor.grad is not None)
            arrived = {part: part.take_gradient().clone() for part in used}
        self.agreement.spread_overflow(arrived.values())
        torch.autograd.backward([part.own for part in arrived], list(arrived.values()))


class _OwnShard:
    """One parameter of the model, and this rank's part of it."""

    def __init__(self, owner: nn.Module, key: str, tensor: nn.Parameter, by_fsdp: bool):
        self._owner, self._key, self.tensor = owner, key, tensor
        local = self._local  # `by_fsdp`: its storage may be longer, with padding that the part includes
        elements = local.untyped_storage().nbytes() // local.element_size()
        self._rows = len(local) if by_fsdp and local.numel() != elements else None  # the rest is padding
        if self._rows is not None:
            row = local.shape[1:]
            local = torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage()).view(-1, *row)
        self.own = nn.Parameter(local.detach(), requires_grad=tensor.requires_grad)
        self._pointer = self.own.data_ptr()

    @property
    def _local(self) -> Tensor:
        # `to_local()` would return a view, whose memory can't be exchanged.
        return self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor

    def describe(self, name: str) -> dict[str, Any]:
        """Return the entry of the parameter `name` in `PartOfModel.describe_parts`.

        Mesh dimensions are in the order of sharding: the first one divides the whole tensor, the next one its chunks.
        """
        described: dict[str, Any] = {**_WHOLE, "of": name, "shape": list(self.tensor.shape)}
        if isinstance(self.tensor, DTensor):
            placements, mesh = self.tensor.placements, self.tensor.device_mesh.mesh
            # fully_shard cuts after tensor parallelism, although its dimension of the mesh stands first.
            order = sorted(range(mesh.ndim), key=lambda i: getattr(placements[i], "split_factor", 1))
            described["ranks"] = mesh.permute(order).tolist()
            by_chunk = all(_is_known(placements[i], placements[i + 1 :], mesh.shape[i + 1 :]) for i in order)
            described["dims"] = [getattr(placements[i], "dim", None) for i in order] if by_chunk else None
        return described

    def check(self, name: str) -> None:
        """Raise ConfigError if the model has another parameter now, whose gradients would be lost."""
        if self._owner._parameters.get(self._key) is not self.tensor:
            raise ConfigError(
                f"{name!r} must stay the parameter that it was when Shards were made; got another. Call fully_shard or "
                "parallelize_module first."
            )

    @property
    def moved(self) -> bool:
        return self._pointer != self.own.data_ptr()

    def follow(self) -> None:
        """Move the model's parameter to the memory of the part, with the padding."""
        self._local.data = self.own.data
        self._pointer = self.own.data_ptr()

    def trim(self) -> None:
        """Leave the padding out of the model's parameter again."""
        if self._rows is not None:
            self._local.data = self.own.data[: self._rows]

    def take_gradient(self) -> Tensor:
        """Take the gradient away from the model; return this rank's part of it."""
        grad: Any = self.tensor.grad
        self.tensor.grad = None
        if isinstance(self.tensor, DTensor):
            if grad.placements != self.tensor.placements:  # such as partial sums
                grad = grad.redistribute(placements=self.tensor.placements)
            grad = grad.to_local()
        if self._rows is None:
            return grad
        padded = torch.zeros_like(self.own)
        padded[: self._rows] = grad
        return padded


def _is_known(placement: Placement, later: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Return whether a mesh dimension cuts as `torch.chunk` does, given the dimensions behind it and their sizes."""
    if type(placement) in (Shard, Replicate):
        return True
    dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", None)
    return factor == math.prod(n for other, n in zip(later, sizes, strict=True) if getattr(other, "dim", None) == dim)


def _check(parameters: dict[str, nn.Parameter], ddp: DistributedDataParallel | None, by_fsdp: bool, grid: Grid) -> None:
    """Raise ConfigError if DDP is not on the ranks of the replica; without DDP if parameters are not DTensors."""
    if ddp is not None:
        ranks = dist.get_process_group_ranks(ddp.process_group)
        if len(ranks) != grid.stages:
            raise ConfigError(
                f"DistributedDataParallel must be on the {grid.stages} ranks of a replica; got a process group of "
                f"{len(ranks)}. Give it none, or process_group=mesh.get_group()."
            )
        return
    plain = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if len(plain) == len(parameters):
        raise ConfigError(
            "model must have parameters that ranks hold together, DTensors; got none. Call fully_shard(model) or "
            "parallelize_module before; or give the model itself to DistributedOptimizer."
        )
    if by_fsdp and plain:
        raise ConfigError(
            f"fully_shard must have all parameters of a model, for it averages gradients over the replica's samples; "
            f"got {plain[0]!r} left out. Call fully_shard(model) on the whole model, last."
        )


# --- torch's device mesh ----------------------------------------------------------------------------------------------
def make_mesh(
    comm: Communicator, sizes: Sequence[int], names: Sequence[str] | None = None, device_type: str = "cpu"
) -> DeviceMesh:
    """Collective. Create torch's device mesh of the ranks of `comm`, those of a replica; see `hpcdist.device_mesh`.

    For torch these are all ranks: its default process group consists of them, on hpcdist (Gloo where the one before it
    is), or on Gloo and NCCL for GPUs. It lasts until the process ends, or until
    `torch.distributed.destroy_process_group()`.

    Raises:
        ConfigError: the ranks are virtual, or the program has started a default process group itself.
    """
    if comm.platform.virtual is not None:
        raise ConfigError(
            "a device mesh must be of real ranks, for torch has one default process group per process; got virtual "
            "ones. Start the script with mpirun or srun."
        )
    if device_type not in _DEVICE_TYPES:
        raise ConfigError(f"device_type must be one of {', '.join(_DEVICE_TYPES)}; got {device_type!r}.")
    if dist.is_initialized() and started_for() is None:
        raise ConfigError(
            "torch.distributed must be started by hpcdist.device_mesh, among the ranks of a replica; got a default "
            "process group that this program has started. Leave out init_process_group, and torchrun."
        )
    if started_for() is not comm:
        host = "gloo" if dist.is_initialized() and dist.get_backend() == "gloo" else host_backend(comm)
        start_default_group(comm, host if device_type == "cpu" else "cpu:gloo,cuda:nccl")
    return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=None if names is None else tuple(names))
