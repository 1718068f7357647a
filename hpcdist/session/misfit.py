"""Batches that do not fit a model or its loss: one sentence, in place of torch's traceback or below it."""

from __future__ import annotations

import copy
import linecache
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.errors import DataError, place

TORCH = os.path.dirname(torch.__file__) + os.sep
KINDS = (RuntimeError, IndexError, ValueError)  # these alone: not OutOfMemoryError, say


@contextmanager
def named_misfits(
    path: Path | str | None, split: str, module: nn.Module | None, **batch: Any
) -> Iterator[dict[str, Any]]:
    """Raise DataError where torch refuses to compute with a batch; errors that the user's code raises stay as they are.

    Args:
        path: of the data's file; None: the job's Datasets.
        batch: x and y, None where this rank does not use it; the context gets them as a dict, and adds the model's
            `outputs`, and as `part` what else computes, such as "the metric accuracy", for the message.
    """
    try:
        yield batch
    except KINDS as error:
        part = batch.pop("part", "the loss" if "outputs" in batch else "the model or its loss")
        name = f"data of {path} ({split})" if path else f"data[{split!r}]"
        text = _explain(error, name, batch, None if module is None else [module], part)
        if text is None:
            raise
        raise DataError(text) from error


def require_labels(loss: Callable[[Tensor, Tensor], Any], outputs: Any, labels: Tensor | None, **of_data: Any) -> None:
    """Raise DataError if the loss, computed on the CPU, refuses the least or the largest label of a data set.

    On a GPU an index out of bounds ends in a device-side assert, which names no value.

    Args:
        outputs: the model's, of any batch.
        labels: of the data set, one integer for each sample; None: unknown.
        of_data: as for `named_misfits`.
    """
    if labels is None or not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    limits = torch.stack(labels.aminmax())
    if limits[0] < 0 or limits[1] >= outputs.shape[1]:  # the loss decides: it may ignore -100, or be a regression's
        with named_misfits(**of_data, module=None, y=labels) as at, torch.no_grad():
            at["outputs"] = outputs
            try:
                copy.deepcopy(loss)(torch.zeros(2, *outputs.shape[1:]), limits)
            except IndexError:
                raise
            except Exception:  # of another kind, such as weights on the GPU: labels may be right
                pass


def misfit_hint(error: BaseException, modules: Iterable[nn.Module]) -> str:
    """Return the sentence for an error in a loop of the user's, which trains these modules; empty for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if frame.f_code.co_filename.startswith(f"{TORCH}nn{os.sep}")]
    if not inside:
        return ""
    code, values = inside[-1].f_code, inside[-1].f_locals
    arguments = [*((name, values.get(name)) for name in code.co_varnames[: code.co_argcount])]
    arguments += [("input", value) for value in values.get("args", ())[:1]]  # of a call of a module
    batch = {name: value for name, value in arguments if not isinstance(value, nn.Parameter)}
    if code.co_name == "cross_entropy":
        batch["outputs"] = batch.pop("input")
    text = _explain(error, "a batch", batch, modules, code.co_name)
    return "" if text is None else f"hpcdist: {text}"


def _explain(
    error: BaseException, name: str, batch: Mapping[str, Any], modules: Iterable[nn.Module] | None, part: str
) -> str | None:
    """Return a sentence on a batch that torch refuses; None for an error that the user's code raises.

    Args:
        modules: the models; None: any layer may refuse the batch.
        part: what refuses it, if no layer does.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    file, line = frames[-1][0].f_code.co_filename, frames[-1][1]
    is_raised = linecache.getline(file, line).lstrip().startswith("raise ")
    of_torch = file.startswith(TORCH) or (not is_raised and type(error) is not ValueError)
    if type(error) not in KINDS or not of_torch or file.startswith(f"{TORCH}autograd"):  # a backward pass
        return None
    advice, called = "the model or the loss", {frame.f_code.co_name for frame, _ in frames}
    names = {child: f"layer {path}," for module in modules or () for path, child in module.named_modules()}
    layers = [child for frame, _ in frames if isinstance(child := frame.f_locals.get("self"), nn.Module)]
    if layers := [child for child in layers if child in names or modules is None]:
        layer, is_leaf = layers[-1], next(layers[-1].children(), None) is None
        where = names.get(layer, "a layer,").replace("layer ,", "the model,")
        part, advice = f"{where} {layer if is_leaf else type(layer).__name__},", "the model"
        if isinstance(layer, nn.Embedding):
            advice = f"the embedding, whose ids are integers from 0 to {layer.num_embeddings - 1}"
    elif isinstance(outputs := batch.get("outputs"), Tensor) and outputs.dim() > 1 and "cross_entropy" in called:
        shape = f"({', '.join(['samples', *map(str, outputs.shape[2:])])})"
        advice += f"; cross entropy takes y of shape {shape}, int64, from 0 to {outputs.shape[1] - 1}"
    got = ", ".join(f"{key} of {_described(value)}" for key, value in batch.items() if isinstance(value, Tensor))
    return (
        f"{name} must fit the model and its loss; got {got or 'one that does not'}, and {part} refuses them: "
        f"{str(error).partition(chr(10))[0].rstrip('.')}{place(error)}. Change the data, or {advice}."
    )


def _described(tensor: Tensor) -> str:
    values = "" if tensor.is_floating_point() or not tensor.numel() else f" from {tensor.min()} to {tensor.max()}"
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}{values}"
