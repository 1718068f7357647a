"""Check what DistributedOptimizer is given: values of its arguments, layers of the model, optimisers with closures."""

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


def require_known(**given: tuple[str, Sequence[str]]) -> None:
    """Raise UnknownNameError where the value of an argument is not among those that it may have."""
    for name, (value, known) in given.items():
        if value not in known:
            raise UnknownNameError(name, value, known)


def checked_model(optimizer: object, model: nn.Module | None, clip_norm: float | None) -> nn.Module:
    """Check the optimiser, the model and the norm; return the model, or raise ConfigError."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        held = getattr(optimizer, "__dict__", {}).items()
        inside = [name for name, value in held if isinstance(value, torch.optim.Optimizer)]
        if inside:
            raise rules.error("the optimiser wraps one, and is none", kind=kind, name=inside[0])
        raise rules.error("the optimiser is none of torch's", kind=kind)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise rules.error("the optimiser takes sparse gradients")
    if not isinstance(model, nn.Module):
        raise rules.error("the model is missing", kind=type(model).__name__)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise rules.error("the model is wrapped in DistributedDataParallel")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be greater than 0, or None; got {clip_norm}.")
    return model


_wrappers: WeakSet[nn.Module] = WeakSet()  # DistributedDataParallel's, all that there are
register_module_module_registration_hook(
    lambda wrapper, *_: _wrappers.add(wrapper) if isinstance(wrapper, DistributedDataParallel) else None
)


def guard_against_ddp(model: nn.Module) -> Callable[[], None]:
    """Let DistributedDataParallel refuse to run this model, and to wrap a part of it; return what ends that.

    The model itself gets no hook: it is saved, copied and sent to other processes as the plain one.
    """

    def refuse(*_: Any) -> None:
        raise rules.error("the model is wrapped in DistributedDataParallel")

    def refuse_part(wrapper: nn.Module, name: str, part: nn.Module | None) -> None:
        if isinstance(wrapper, DistributedDataParallel) and any(module is part for module in model.modules()):
            refuse()

    own, handles = set(model.modules()), [register_module_module_registration_hook(refuse_part)]
    handles += [each.register_forward_pre_hook(refuse) for each in _wrappers if own & set(each.modules())]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def require_no_norms(model: nn.Module) -> None:
    """Raise ConfigError where a layer changes weights in its forward pass, by its rank's own batch."""
    for name, table in model.named_modules():
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.max_norm is not None:
            raise rules.error("embeddings are normalised in the forward pass", max_norm=table.max_norm, name=name)


def must_have_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether its step requires a closure, which it may then evaluate several times."""
    step = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and (closure.default is closure.empty or _insists(step))


def _insists(step: Callable[..., Any]) -> bool:
    """Tell whether a step declares `closure=None`, and then raises an error without one, as those of SAM do."""
    if step.__module__.startswith("torch.optim."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):  # there is no source
        return False
    demands = ("closure is not None", "closure")
    misses = ("closure is None", "not closure")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and ast.unparse(node.test) in demands:
            return True
        if isinstance(node, ast.If) and ast.unparse(node.test) in misses and isinstance(node.body[-1], ast.Raise):
            return True
    return False


def check_evaluating(name: str, strategy: str, cls: type[Strategy], config: Any, clip_norm: float | None) -> None:
    """Raise ConfigError where a setting does not suit an optimiser, of that name, that evaluates its closure."""
    rules.refuse("the optimiser evaluates its closure several times", cls, optimizer=name)
    config.require_plain(name)
    if clip_norm is not None:
        raise rules.error("such an optimiser's gradients are clipped", optimizer=name, clip_norm=clip_norm)
    if config.on_nonfinite == "skip":
        raise rules.error("such an optimiser's steps are left out", optimizer=name)


# --- arguments of Horovod and DistributedDataParallel, and the names that hpcdist has for them ------------------------
_ANSWERS = {
    "named_parameters": "Pass the model itself, second: DistributedOptimizer(optimizer, model)",
    "backward_passes_per_step": "Use accumulation=N, or run all but the last pass inside optimizer.no_sync()",
    "op": "Gradients are averaged; loss='sum' adds them up, and provider={'name': 'horovod', 'op': 'adasum'} is Adasum",
    "gradient_predivide_factor": "Leave it out: gradients are averaged",
    "num_groups": "Use bucket_bytes=N",
    "groups": "Use bucket_bytes=N",
    "sparse_as_dense": "Leave it out: sparse gradients are always made dense",
    "process_set": "Pass the ranks to hpcdist.init(comm=...)",
    "device_ids": "Leave it out: put the model on its device before",
    "find_unused_parameters": "Leave it out: parameters without a gradient are seen",
    "broadcast_buffers": "Use buffers={'*': 'own'} for False, or leave it out",
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
