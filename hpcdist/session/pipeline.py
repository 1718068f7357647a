"""Train a model that several ranks hold together, in the user's own loop: in stages, or in torch's shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hpcdist.errors import ConfigError
from hpcdist.parallel.agreement import PartOfModel
from hpcdist.parallel.cost import measure
from hpcdist.parallel.cut import Cut
from hpcdist.parallel.grid import Grid
from hpcdist.parallel.pipeline import Pipeline
from hpcdist.parallel.plan import measured_cut
from hpcdist.session import rules
from hpcdist.session.world import Session, current, require_equal
from hpcdist.strategies import Strategy

if TYPE_CHECKING:  # DTensors take half a second to import, which not every loop needs
    from torch.distributed.device_mesh import DeviceMesh

    from hpcdist.parallel.shards import Shards


def pipeline(
    model: Callable[[], Any] | nn.Module | Sequence[nn.Module],
    loss: Callable[[Any, Any], Tensor],
    *,
    stages: int,
    micro_batches: int = 4,
    schedule: str = "one_f_one_b",
    chunks: int = 1,
    recompute: bool = False,
    cut: Cut | Sequence[int] | None = None,
    example: tuple[Any, Any] | None = None,
    spread: bool = False,
    routing: str = "straight",
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Pipeline:
    """Collective. Cut `model` into stages, one per rank of `stages` consecutive ranks; return this rank's.

    ::

        model = hd.pipeline(make_model, loss_fn, stages=4)
        optimizer = hd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, strategy="gossip_pull")
        for x, y in hd.shard(loader):
            loss = model.step(x, y)

    `stages` ranks hold one replica of the model; all ranks together are a grid of stages and replicas. From here on
    DistributedOptimizers train the replicas of each stage together, and `shard` gives all ranks of a replica the same
    batches. Instead of `model.step` a loop may call `model.forward_backward(x, y)`, perhaps
    several times, `model.clip_grad_norm_(max_norm)`, and its optimisers' `step`.

    Args:
        model: a function that returns an nn.Sequential, a list of layers or a `hpcdist.parallel.Chain`, so that no rank
            ever holds the whole model; or the model itself, of which each rank keeps its stages.
        loss: (outputs, targets) -> the mean loss of a micro-batch, a scalar; called on the last stage's rank.
        stages: ranks of a replica; divides the number of all ranks.
        micro_batches: number of parts into which each batch is divided, which are under way at the same time.
        schedule: order in which a rank works on them; see `hpcdist plan`.
        chunks: stages on each rank, which its schedule must allow.
        recompute: compute activations again in the backward pass, for memory.
        cut: number of layers of each stage; by default stages have about equal numbers of parameters.
        example: a batch (x, y), as for `model.step`. Rank 0 measures each layer with its first micro-batch, and stages
            take about equal times: the cut of `hpcdist plan`. It may be another one in the next run.
        spread: let a replica's ranks be on several nodes.
        routing: straight, or random: from each stage to the next one a micro-batch goes to a replica that is drawn for
            it, so that each stage is trained together with all replicas of its neighbours. Then the loss that a step
            returns is that of the micro-batches which have ended at this replica.
        seed: of random routing.
        device: device of this rank's stages; that of the model, if None.

    Raises:
        ConfigError: the ranks are no multiple of `stages`, the model has fewer layers, or is distributed already;
            both `cut` and `example` are given.
        MismatchError: ranks differ in what they ask for.
    """
    session = current()
    _check_model(session, model)
    if example is not None and cut is not None:
        raise ConfigError(f"cut must be omitted with an example, by which layers are measured; got {cut}. Give one.")
    sizes = list(cut.sizes) if isinstance(cut, Cut) else None if cut is None else list(cut)
    how: dict[str, Any] = {"micro_batches": micro_batches, "schedule": schedule, "chunks": chunks}
    how["recompute"] = recompute
    mine = {"stages": stages, "spread": spread, "cut": sizes, "example": example is not None, "routing": routing}
    mine["seed"] = seed
    require_equal(session.comm, mine | how, "settings of the pipeline")
    grid = grid_of(session, stages, spread)
    if example is not None:
        x, y = _micro_batch(example, micro_batches)
        cut = measured_cut(session.comm, lambda: measure(model, x, loss, y, device=device or "cpu"), stages, **how)
    made = Pipeline(model, loss, grid, cut=cut, routing=routing, seed=seed, device=device, **how)
    session.grid, session.grid_by = grid, "hpcdist.pipeline"
    return made


def _check_model(session: Session, model: object) -> None:
    """Raise ConfigError where the model is in stages, or distributed, already."""
    if isinstance(model, Pipeline):
        raise ConfigError("model must not be in stages already; got what hpcdist.pipeline has returned. Use that.")
    if any(optimizer.strategy.model.module is model for optimizer in session.optimizers):
        raise ConfigError(
            "model must be cut into stages before a DistributedOptimizer trains it; got one that is trained. Call "
            "hpcdist.pipeline first, and give DistributedOptimizer what it returns."
        )


def _micro_batch(example: Any, micro_batches: int) -> tuple[Any, Any]:
    """Return the first micro-batch of a batch of inputs and targets."""
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise ConfigError(
            f"example must be a batch, a tuple of inputs and targets; got {type(example).__name__}. Give what the loop "
            "gives model.step, such as next(iter(loader))."
        )

    def first(leaf: Any) -> Any:
        return leaf[: -(-len(leaf) // max(1, micro_batches))] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return pytree.tree_map(first, example[0]), pytree.tree_map(first, example[1])


def grid_of(session: Session, stages: int, spread: bool) -> Grid:
    """Collective. Return the session's grid, or a new one of so many stages."""
    grid = session.grid
    if grid is not None and grid.stages == stages:
        return grid
    if session.optimizers:
        raise ConfigError(
            f"stages must be the same for all models that are trained at a time, {session.stages}; got {stages}. End "
            "the other training first (hpcdist.finish), or cut into as many."
        )
    return Grid(session.comm, stages, spread)


# --- what DistributedOptimizer needs ----------------------------------------------------------------------------------
def require_in_stages(session: Session, model: nn.Module) -> None:
    """Check that a model is of this session's grid, where there is one; raise ConfigError otherwise."""
    if isinstance(model, PartOfModel):
        if session.grid is None and not session.optimizers:
            session.grid = model.grid
        if model.grid is not session.grid:
            raise ConfigError(
                "model must be cut by hpcdist.pipeline in this session; got one of another grid of ranks. Call "
                "hpcdist.init first, then hpcdist.pipeline, or device_mesh and local_shards."
            )
    elif session.stages > 1:
        raise ConfigError(
            f"model must be what {session.grid_by} has returned where {session.stages} ranks hold one model together; "
            f"got {type(model).__name__}. Pass that to DistributedOptimizer, and its parameters() to the optimiser."
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, evaluating: bool, strategy: type[Strategy]
) -> None:
    """Check that an optimiser and a strategy can train one stage of several; raise ConfigError otherwise."""
    rules.refuse("the model is in stages", strategy)
    if evaluating:
        raise rules.error("the optimiser of a stage searches along lines", kind=type(optimizer).__name__)
    own = set(map(id, model.parameters()))
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if others:
        raise rules.error("the optimiser of a stage has other parameters", count=len(others))


def share_tied(model: nn.Module) -> None:
    """Collective in the replica where stages share parameters. Give them the first stage's values."""
    if isinstance(model, PartOfModel):
        model.share_values()


# --- shards -----------------------------------------------------------------------------------------------------------
def device_mesh(
    *sizes: int, names: Sequence[str] | None = None, device_type: str = "cpu", spread: bool = False
) -> DeviceMesh:
    """Collective. Let consecutive ranks hold one model together, and return torch's mesh of this rank's replica.

    ::

        mesh = hd.device_mesh(4)
        fully_shard(model, mesh=mesh)  # or parallelize_module(model, mesh, plan)
        shards = hd.local_shards(model)
        optimizer = hd.DistributedOptimizer(torch.optim.AdamW(shards.parameters()), shards, strategy="gossip_pull")

    For torch.distributed the ranks of the replica are the whole world. From here on DistributedOptimizers train each
    rank's shards together with the same ones of the other replicas, and `shard` deals samples out among replicas.

    Args:
        sizes: of the mesh, such as (4,) or (2, 2). A replica has as many ranks as their product, which must divide the
            number of all ranks.
        names: of its dimensions.
        device_type: cpu (hpcdist), or cuda (NCCL), for which each rank has chosen its GPU by torch.cuda.set_device.
        spread: let a replica's ranks be on several nodes.

    Raises:
        ConfigError: the number of ranks does not suit the sizes, or ranks are virtual; or the program has started
            torch.distributed.
        MismatchError: ranks differ in what they ask for.
    """
    from hpcdist.parallel.shards import make_mesh

    session = current()
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(f"sizes of a device mesh must be integers of at least 1; got {sizes}. Give one or several.")
    mine = {"sizes": sizes, "names": names, "device_type": device_type, "spread": spread}
    require_equal(session.comm, mine, "the device mesh")
    grid = grid_of(session, math.prod(sizes), spread)
    mesh = make_mesh(grid.inner, sizes, names, device_type)
    session.grid, session.grid_by = grid, "hpcdist.local_shards, on the mesh of hpcdist.device_mesh,"
    return mesh


def local_shards(model: nn.Module) -> Shards:
    """Collective. Return this rank's parts of a model, for an optimiser and for DistributedOptimizer.

    The model is one of DTensors, or one in DistributedDataParallel, of which each rank has all.

    Call it last, when the model is on its device and distributed over the mesh that `device_mesh` has returned. The
    loop runs the model itself, and zeroes gradients by the optimiser's `zero_grad`.

    Raises:
        ConfigError: no mesh was made, or the model has no DTensor; or fully_shard has left out some parameter, or
            DistributedDataParallel is on other ranks than the mesh's.
    """
    from hpcdist.parallel.shards import Shards

    grid = current().grid
    if grid is None:
        raise ConfigError(
            "hpcdist.device_mesh must be called before local_shards; got no mesh. Share the model out on that mesh."
        )
    return Shards(model, grid)
