"""Refuse arguments of Horovod and of DistributedDataParallel with the names that hpcdist has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.errors import ConfigError

_ANSWERS = {
    "named_parameters": "Pass the model itself, second: DistributedOptimizer(optimizer, model)",
    "backward_passes_per_step": "Use accumulation=N, or run all but the last pass inside optimizer.no_sync()",
    "op": "Gradients are averaged; for a sum or Adasum use provider={'name': 'horovod', 'op': 'sum'}",
    "gradient_predivide_factor": "Leave it out: gradients are averaged",
    "num_groups": "Use bucket_bytes=N",
    "groups": "Use bucket_bytes=N",
    "sparse_as_dense": "Leave it out: sparse gradients are always made dense",
    "process_set": "Pass the ranks to hpcdist.init(comm=...)",
    "device_ids": "Leave it out: put the model on its device before",
    "find_unused_parameters": "Leave it out: parameters without a gradient are seen",
    "broadcast_buffers": "Leave it out: buffers that change are averaged, see the strategy",
    "gradient_as_bucket_view": "Leave it out: gradients are views already",
    "static_graph": "Leave it out",
    "bucket_cap_mb": "Use bucket_bytes=N",
    "process_group": "Pass the ranks to hpcdist.init(comm=...)",
}


def require_own_names(options: Mapping[str, Any]) -> None:
    """Check options for arguments of Horovod or DistributedDataParallel; raise ConfigError with hpcdist's own."""
    for name in options:
        if name in _ANSWERS:
            raise ConfigError(
                f"DistributedOptimizer must be given arguments of hpcdist's; got {name!r}, which it has not. "
                f"{_ANSWERS[name]}."
            )
    compression = options.get("compression")
    if compression is not None and not isinstance(compression, (str, Mapping)):
        raise ConfigError(
            "strategy.compression must be a name, or a dict with a name and options; got "
            f"{getattr(compression, '__name__', type(compression).__name__)}. For Horovod's Compression.fp16 write "
            "compression='fp16'."
        )
