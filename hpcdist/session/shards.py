"""Train models whose parameters torch shares out among the ranks of a node: fully_shard, tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from hpcdist.errors import ConfigError
from hpcdist.session.pipeline import grid_of
from hpcdist.session.world import current, require_equal

if TYPE_CHECKING:  # DTensors take half a second to import, which not every loop needs
    from torch.distributed.device_mesh import DeviceMesh

    from hpcdist.parallel.shards import Shards


def device_mesh(
    *sizes: int, names: Sequence[str] | None = None, device_type: str = "cpu", spread: bool = False
) -> DeviceMesh:
    """Collective. Let consecutive ranks hold one model together, and return torch's mesh of this rank's replica.

    ::

        mesh = hd.device_mesh(4)
        fully_shard(model, mesh=mesh)  # or parallelize_module(model, mesh, plan)
        shards = hd.local_shards(model)
        optimizer = hd.DistributedOptimizer(torch.optim.AdamW(shards.parameters()), shards, strategy="gossip_pull")

    To torch.distributed the ranks of the replica are all that there are. From here on DistributedOptimizers train each
    rank's shards together with the same ones of the other replicas, and `shard` deals samples out among replicas.

    Args:
        sizes: of the mesh, (4,) or (2, 2), say; a replica has their product of ranks, which divides that of all.
        names: of its dimensions.
        device_type: cpu (Gloo), or cuda (NCCL), for which each rank has chosen its GPU by torch.cuda.set_device.
        spread: let a replica's ranks be on several nodes.

    Raises:
        ConfigError: the ranks can't be shared out so, or are virtual; or the program has started torch.distributed.
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
    session.grid = grid
    return mesh


def local_shards(model: nn.Module) -> Shards:
    """Collective. Return this rank's parts of a model of DTensors, for an optimiser and for DistributedOptimizer.

    Call it last, once the model is on its device and shared out on the mesh that `device_mesh` has returned. The loop
    runs the model itself, and zeroes gradients by the optimiser's `zero_grad`.

    Raises:
        ConfigError: no mesh was made, or the model has no DTensor; or fully_shard has left out some parameter.
    """
    from hpcdist.parallel.shards import Shards

    grid = current().grid
    if grid is None:
        raise ConfigError(
            "hpcdist.device_mesh must be called before local_shards; got no mesh. Share the model out on that mesh."
        )
    return Shards(model, grid)
