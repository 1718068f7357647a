"""Train with Lightning's Trainer, or Fabric, by any strategy of hpcdist::

    trainer = Trainer(strategy=hpcdist.lightning.HpcdistStrategy("gossip_pull"))

Ranks are started by mpirun or srun, not by Lightning. Lightning itself is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hpcdist.errors import require_packages

if TYPE_CHECKING:  # for editors and type checkers; see __getattr__
    from hpcdist.lightning.environment import HpcdistEnvironment
    from hpcdist.lightning.fabric import HpcdistFabricStrategy
    from hpcdist.lightning.trainer import HpcdistStrategy

# Private names of Lightning 2.6 and its torchmetrics that are used here, because nothing public does the same:
#   Trainer._accelerator_connector.use_distributed_sampler, an argument of the user's Trainer;
#   Strategy._layer_sync, chosen by sync_batchnorm=True;
#   Trainer._results, _TrainingEpochLoop._results, _ResultMetric._forward_cache, Metric._defaults: logged values;
#   MetricCollection._enable_compute_groups, _groups_checked: whether metrics share states;
#   _TrainingEpochLoop._broadcast_sigterm_tensor, a call of torch.distributed in each step;
#   _IndexBatchSamplerWrapper, which passes indices to a BasePredictionWriter;
#   Fabric: Strategy._set_world_ranks, _backward_sync_control and _BackwardSyncControl, for no_backward_sync.

__all__ = ["HpcdistEnvironment", "HpcdistFabricStrategy", "HpcdistStrategy"]

_HOMES = {"HpcdistEnvironment": "environment", "HpcdistFabricStrategy": "fabric", "HpcdistStrategy": "trainer"}


def __getattr__(name: str) -> Any:
    # Imported on first use: Lightning takes seconds to import, Fabric less.
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcdist.lightning' has no attribute {name!r}")
    require_packages("hpcdist.lightning", "lightning", "lightning")
    return getattr(importlib.import_module(f"hpcdist.lightning.{_HOMES[name]}"), name)
