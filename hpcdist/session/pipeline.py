"""Train a model that is divided among several ranks, in the user's training loop: in stages, or in torch's shards."""

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

if TYPE_CHECKING:  # importing DTensors takes half a second
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
    """Collective. Divide `model` into stages, one for each of `stages` consecutive ranks; return this rank's stage.

    `stages` ranks hold one replica of the model; the ranks form a grid of stages and replicas. From then on,
    DistributedOptimizers train the replicas of each stage jointly, and `shard` gives all ranks of a replica the same
    batches. Train by `model.step(x, y)`, or by `model.forward_backward(x, y)`, perhaps several times,
    `model.clip_grad_norm_(max_norm)`, and the optimisers' `step`.

    Example on 4 ranks:
        >>> layers = lambda: [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]
        >>> model = hd.pipeline(layers, nn.functional.cross_entropy, stages=2)  # 2 replicas of 2 stages
        >>> hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).zero_grad()
        >>> loss = model.step(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))

    Args:
        model: a function that returns an nn.Sequential, a list of layers or a `hpcdist.parallel.Chain`, so that no rank
            ever holds the whole model; or the model itself, of which each rank keeps its stages.
        loss: (outputs, targets) -> the mean loss of a micro-batch, a scalar; called on the last stage's rank.
        stages: number of ranks of a replica; divides the number of all ranks.
        micro_batches: number of parts of each batch, which are in flight at the same time.
        schedule: order in which a rank computes them; see `hpcdist plan`.
        chunks: stages on each rank, if the schedule supports several.
        recompute: compute activations again in the backward pass, to save memory.
        cut: number of layers of each stage; by default stages have about equal numbers of parameters.
        example: a batch (x, y), as for `model.step`. Rank 0 measures each layer with its first micro-batch, and stages
            get about equal times: the cut of `hpcdist plan`. It may differ in the next run.
        spread: allow a replica's ranks to be on several nodes.
        routing: straight, or random: after each stage a micro-batch moves to a random replica of the next stage, so
            that each stage trains with all replicas of its neighbours. The loss of a step is then that of the
            micro-batches that ended at this replica.
        seed: for random routing.
        device: device of this rank's stages; None: that of the model.

    Raises:
        ConfigError: the number of ranks is no multiple of `stages`, the model has fewer layers, or is distributed
            already; both `cut` and `example` are set.
        MismatchError: ranks differ in the arguments.
    """
    session = current()
    _check_model(session, model)
    if example is not None and cut is not None:
        raise ConfigError(f"cut must be None with an example, by which layers are measured; got {cut}. Pass only one.")
    sizes = list(cut.sizes) if isinstance(cut, Cut) else None if cut is None else list(cut)
    options: dict[str, Any] = {"micro_batches": micro_batches, "schedule": schedule, "chunks": chunks}
    options["recompute"] = recompute
    settings = {"stages": stages, "spread": spread, "cut": sizes, "example": example is not None, "routing": routing}
    require_equal(session.comm, settings | {"seed": seed} | options, "settings of the pipeline")
    grid = grid_of(session, stages, spread)
    if example is not None:
        x, y = _micro_batch(example, micro_batches)
        cut = measured_cut(session.comm, lambda: measure(model, x, loss, y, device=device or "cpu"), stages, **options)
    stage = Pipeline(model, loss, grid, cut=cut, routing=routing, seed=seed, device=device, **options)
    session.grid, session.grid_by = grid, "hpcdist.pipeline"
    return stage


def _check_model(session: Session, model: object) -> None:
    """Raise ConfigError if the model is in stages, or distributed, already."""
    if isinstance(model, Pipeline):
        raise ConfigError("model must not be in stages already; got what hpcdist.pipeline returned. Use that.")
    if any(optimizer.strategy.model.module is model for optimizer in session.optimizers):
        raise ConfigError(
            "model must be cut into stages before a DistributedOptimizer trains it; got one that is trained. Call "
            "hpcdist.pipeline first, and pass its result to DistributedOptimizer."
        )


def _micro_batch(example: Any, micro_batches: int) -> tuple[Any, Any]:
    """Return the first micro-batch of a batch of inputs and targets."""
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise ConfigError(
            f"example must be a batch, a tuple of inputs and targets; got {type(example).__name__}. Pass what the loop "
            "passes to model.step, such as next(iter(loader))."
        )

    def first(leaf: Any) -> Any:
        return leaf[: -(-len(leaf) // max(1, micro_batches))] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return pytree.tree_map(first, example[0]), pytree.tree_map(first, example[1])


def grid_of(session: Session, stages: int, spread: bool) -> Grid:
    """Collective. Return the session's grid, or a new one with this number of stages."""
    grid = session.grid
    if grid is not None and grid.stages == stages:
        return grid
    if session.optimizers:
        raise ConfigError(
            f"stages must be the same for all models that are trained at the same time, {session.stages}; got "
            f"{stages}. End the other training first (hpcdist.finish), or use the same number."
        )
    return Grid(session.comm, stages, spread)


# --- what DistributedOptimizer needs ----------------------------------------------------------------------------------
def require_in_stages(session: Session, model: nn.Module) -> None:
    """Raise ConfigError unless the model belongs to this session's grid (if there is one)."""
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
            f"model must be the result of {session.grid_by} if {session.stages} ranks hold one model together; "
            f"got {type(model).__name__}. Pass that to DistributedOptimizer, and its parameters() to the optimiser."
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, evaluating: bool, strategy: type[Strategy]
) -> None:
    """Raise ConfigError if an optimiser or a strategy can't train a model in stages."""
    rules.refuse("the model is in stages", strategy)
    if evaluating:
        raise rules.error("the optimiser of a stage searches along lines", kind=type(optimizer).__name__)
    params = set(map(id, model.parameters()))
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in params]
    if others:
        raise rules.error("the optimiser of a stage has other parameters", count=len(others))


def share_tied(model: nn.Module) -> None:
    """Copy the first stage's values to stages that share parameters. Collective in the replica, if there are any."""
    if isinstance(model, PartOfModel):
        model.share_values()


# --- shards -----------------------------------------------------------------------------------------------------------
def device_mesh(
    *sizes: int, names: Sequence[str] | None = None, device_type: str = "cpu", spread: bool = False
) -> DeviceMesh:
    """Collective. Let consecutive ranks jointly hold one model; return torch's DeviceMesh of this rank's replica.

    Shard the model over the mesh (`fully_shard(model, mesh=mesh)`, or `parallelize_module(model, mesh, plan)`), then
    call `local_shards`. torch.distributed's world is the replica. From then on, DistributedOptimizers train each rank's
    shards with the same shards of other replicas, and `shard` distributes samples among replicas.

    Example:
        >>> mesh = hd.device_mesh(4, names=("shard",))  # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh)  # doctest: +SKIP

    Args:
        sizes: of the mesh, such as (4,) or (2, 2). Their product, a replica's number of ranks, must divide that of all.
        names: of the dimensions.
        device_type: cpu (hpcdist), or cuda (NCCL; each rank has set its GPU by torch.cuda.set_device).
        spread: allow a replica's ranks to be on several nodes.

    Raises:
        ConfigError: the number of ranks does not fit the sizes; ranks are virtual; torch.distributed was started.
        MismatchError: ranks differ in the arguments.
    """
    from hpcdist.parallel.shards import make_mesh

    session = current()
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(f"sizes of a device mesh must be integers of at least 1; got {sizes}. Give one or several.")
    settings = {"sizes": sizes, "names": names, "device_type": device_type, "spread": spread}
    require_equal(session.comm, settings, "the device mesh")
    grid = grid_of(session, math.prod(sizes), spread)
    mesh = make_mesh(grid.inner, sizes, names, device_type)
    session.grid, session.grid_by = grid, "hpcdist.local_shards, on the mesh of hpcdist.device_mesh,"
    return mesh


def local_shards(model: nn.Module) -> Shards:
    """Collective. Return this rank's shards of a model, to train by a DistributedOptimizer.

    Call it last, when the model is on its device and distributed over the mesh of `device_mesh`: its parameters are
    DTensors, or it is in DistributedDataParallel, and each rank holds all of it. In the loop run `model` itself, and
    zero gradients by the optimiser's `zero_grad`.

    Example:
        >>> shards = hd.local_shards(model)  # doctest: +SKIP
        >>> optimizer = hd.DistributedOptimizer(torch.optim.AdamW(shards.parameters()), shards)  # doctest: +SKIP

    Raises:
        ConfigError: no mesh was created, or the model has no DTensor; fully_shard has skipped a parameter; or
            DistributedDataParallel is on other ranks than the mesh.
    """
    from hpcdist.parallel.shards import Shards

    grid = current().grid
    if grid is None:
        raise ConfigError(
            "hpcdist.device_mesh must be called before local_shards; got no mesh. Shard the model over that mesh."
        )
    return Shards(model, grid)
