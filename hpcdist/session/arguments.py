"""Check the arguments of DistributedOptimizer: their values, layers of the model, optimisers with closures."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.session import rules
from hpcdist.strategies import Strategy


def require_known(**arguments: tuple[str, Sequence[str]]) -> None:
    """Raise UnknownNameError if an argument's value is not among its known ones: `name=(value, known)`."""
    for name, (value, known) in arguments.items():
        if value not in known:
            raise UnknownNameError(name, value, known)


def checked_model(optimizer: object, model: nn.Module | None, clip_norm: float | None) -> nn.Module:
    """Return the model; raise ConfigError unless it, the optimiser and the norm suit a DistributedOptimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        attributes = getattr(optimizer, "__dict__", {}).items()
        wrapped = [name for name, value in attributes if isinstance(value, torch.optim.Optimizer)]
        if wrapped:
            raise rules.error("the optimiser wraps another one", kind=kind, name=wrapped[0])
        raise rules.error("the optimiser is not torch's", kind=kind)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise rules.error("the optimiser takes sparse gradients")
    if not isinstance(model, nn.Module):
        raise rules.error("the model is missing", kind=type(model).__name__)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise rules.error("the model is wrapped in DistributedDataParallel")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be greater than 0, or None; got {clip_norm}.")
    return model


_wrappers: WeakSet[nn.Module] = WeakSet()  # all instances of DistributedDataParallel, which register a module
register_module_module_registration_hook(
    lambda wrapper, *_: _wrappers.add(wrapper) if isinstance(wrapper, DistributedDataParallel) else None
)


def guard_against_ddp(model: nn.Module) -> Callable[[], None]:
    """Let DistributedDataParallel refuse to run or wrap this model and its parts; return a function that ends that.

    The model itself gets no hook, so that it can be saved, copied and sent to other processes as before.
    """

    def refuse(*_: Any) -> None:
        raise rules.error("the model is wrapped in DistributedDataParallel")

    def refuse_part(wrapper: nn.Module, name: str, part: nn.Module | None) -> None:
        if isinstance(wrapper, DistributedDataParallel) and any(module is part for module in model.modules()):
            refuse()

    modules, handles = set(model.modules()), [register_module_module_registration_hook(refuse_part)]  # later wrappers
    handles += [each.register_forward_pre_hook(refuse) for each in _wrappers if modules & set(each.modules())]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def require_no_max_norm(model: nn.Module) -> None:
    """Raise ConfigError if a layer changes its weights in the forward pass, for the rows of its rank's batch only."""
    for name, table in model.named_modules():
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.max_norm is not None:
            raise rules.error("embeddings are normalised in the forward pass", max_norm=table.max_norm, name=name)


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step requires a closure, which it may evaluate several times."""
    step = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and (closure.default is closure.empty or _raises_without_closure(step))


def _raises_without_closure(step: Callable[..., Any]) -> bool:
    """Return whether a step declares `closure=None`, but raises an error without one, as those of SAM do."""
    if step.__module__.startswith("torch.optim."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):  # no source
        return False
    present = ("closure is not None", "closure")
    absent = ("closure is None", "not closure")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and ast.unparse(node.test) in present:
            return True
        if isinstance(node, ast.If) and ast.unparse(node.test) in absent and isinstance(node.body[-1], ast.Raise):
            return True
    return False


def check_closure_settings(name: str, strategy: str, cls: type[Strategy], config: Any, clip_norm: float | None) -> None:
    """Raise ConfigError if a setting does not suit an optimiser, called `name`, that evaluates its closure itself."""
    rules.refuse("the optimiser evaluates its closure several times", cls, optimizer=name)
    config.require_plain(name)
    if clip_norm is not None:
        raise rules.error("such an optimiser's gradients are clipped", optimizer=name, clip_norm=clip_norm)
    if config.on_nonfinite == "skip":
        raise rules.error("such an optimiser's steps are skipped", optimizer=name)


# --- arguments of Horovod and DistributedDataParallel, and what to use instead ----------------------------------------
_REPLACEMENTS = {
    "named_parameters": "Pass the model itself, second: DistributedOptimizer(optimizer, model)",
    "backward_passes_per_step": "Use accumulation=N, or run all but the last pass inside optimizer.no_sync()",
    "op": "Gradients are averaged; loss='sum' adds them up, and provider={'name': 'horovod', 'op': 'adasum'} is Adasum",
    "gradient_predivide_factor": "Remove it: gradients are averaged",
    "num_groups": "Use bucket_bytes=N",
    "groups": "Use bucket_bytes=N",
    "sparse_as_dense": "Remove it: sparse gradients are always converted to dense ones",
    "process_set": "Pass the ranks to hpcdist.init(comm=...)",
    "device_ids": "Remove it: move the model to its device first",
    "find_unused_parameters": "Remove it: parameters without a gradient are detected",
    "broadcast_buffers": "Use buffers={'*': 'own'} for False, or remove it",
    "gradient_as_bucket_view": "Remove it: gradients are views already",
    "static_graph": "Remove it",
    "bucket_cap_mb": "Use bucket_bytes=N",
    "process_group": "Pass the ranks to hpcdist.init(comm=...)",
}


def refuse_foreign_names(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of Horovod or DistributedDataParallel; the message names the replacement."""
    for name in options:
        if name in _REPLACEMENTS:
            raise ConfigError(
                f"DistributedOptimizer must get arguments of hpcdist's; got {name!r}, which it does not have. "
                f"{_REPLACEMENTS[name]}."
            )
    compression = options.get("compression")
    if compression is not None and not isinstance(compression, (str, Mapping)):
        raise ConfigError(
            "strategy.compression must be a name, or a dict with a name and options; got "
            f"{getattr(compression, '__name__', type(compression).__name__)}. For Horovod's Compression.fp16 write "
            "compression='fp16'."
        )
