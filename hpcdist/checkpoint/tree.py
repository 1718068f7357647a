"""Write a nested state as JSON plus tensors, and read it back bitwise.

Values of JSON's types (strings, booleans, null, lists, dicts with string keys, integers and floats of ordinary size)
are written unchanged; any other is a dict of one entry whose key starts with "$".
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.checkpoint.refusal import understood
from hpcdist.checkpoint.slices import Slice, SlicePosition
from hpcdist.checkpoint.tensors import LIBRARY, STORED
from hpcdist.errors import CheckpointError

MAX_DEPTH = 100
_JSON_INTEGER = 1 << 63  # Python reads longer ones from text slowly, and past 4300 digits not at all
_RULE = (
    "must be None, a bool, int, float, str, bytes, list, tuple, dict, Counter, dense tensor of a type that safetensors "
    f"{LIBRARY} has, or a NumPy scalar or array of a type that torch has"
)


def encode(state: Any, name: str = "state") -> tuple[Any, dict[str, Tensor], dict[str, SlicePosition]]:
    """Split a state into a tree for JSON, and tensors by their path in it, such as `state['model']['weight']`.

    The third result has the positions of tensors that are slices. Tensors are not copied. Identical views of the same
    memory are stored once, and are one tensor again when decoded; views that overlap become independent tensors. An
    OrderedDict is stored as a dict, a torch.Size as a tuple, a Parameter as a tensor, an array in native byte order.

    Raises:
        CheckpointError: a value of another type, or nesting deeper than 100 (such as a list that contains itself).
    """
    encoder = _Encoder()
    return encoder.encode(state, name, 0), encoder.tensors, encoder.positions


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.positions: dict[str, SlicePosition] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str, depth: int) -> Any:
        """Return the node for a value at `path` in the state; add its tensors to `tensors`."""
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"{path} must be nested at most {MAX_DEPTH} deep; got more. Does the state contain itself?"
            )
        kind = type(value)  # exact: subclasses (enumerations, np.float64) would come back as something else
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_JSON_INTEGER <= value < _JSON_INTEGER else {"$int": hex(value)}
        if kind is float:
            return value if isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (dict, OrderedDict, Counter):
            return self._encode_dict(value, path, depth)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if kind is Slice:
            return {"$slice": self._encode_tensor(value.tensor, path, value.position)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_array(value, path)
        raise _refusal(path, value)

    def _encode_dict(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int, float, bool, type(None), tuple):
                raise CheckpointError(
                    f"{path} must have keys that are None or of type str, int, float, bool, tuple; got {key!r:.60} "
                    f"({_type_name(key)}). Convert it, or remove it from the state."
                )
        values = {key: self.encode(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        plain = type(value) is not Counter and all(type(key) is str and not key.startswith("$") for key in values)
        if plain:
            return values
        pairs = [[self.encode(key, f"{path}.keys()", depth + 1), item] for key, item in values.items()]
        return {"$counter" if type(value) is Counter else "$dict": pairs}

    def _encode_tensor(self, value: Tensor, path: str, position: SlicePosition | None = None) -> dict[str, Any]:
        """Add a tensor under its path, unless an identical view has a name; return the node with the tensor's name."""
        dense = value.layout is torch.strided and not (value.is_nested or value.is_meta)
        if not dense or type(value.data) is not Tensor:  # a subclass may store its elements elsewhere
            raise _refusal(path, value)
        stored = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
        if stored.dtype not in STORED:
            raise _refusal(path, value)
        key = (stored.data_ptr(), stored.dtype, stored.shape, stored.stride(), stored.device, stored.is_neg(), position)
        if path in self.tensors:  # two NaN keys, or tensors in a dict's keys
            path = f"{path} #{len(self.tensors)}"
        name = self._names.setdefault(key, path) if stored.numel() else path
        self.tensors[name] = stored
        if position is not None:
            self.positions[name] = position
        return {"$complex" if value.is_complex() else "$tensor": name}

    def _encode_array(self, value: Any, path: str) -> dict[str, Any]:
        array = np.asarray(value)
        try:
            # from_numpy warns about read-only arrays
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        except (TypeError, ValueError):  # a type that torch lacks; negative strides, foreign byte order
            try:
                tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
            except (TypeError, ValueError):
                raise _refusal(path, value) from None
        return {"$array" if type(value) is np.ndarray else "$scalar": self._encode_tensor(tensor, path)}


class TreeDecoder:
    """Decodes states from the trees and tensors of `encode`. Tensors are on the CPU; slices are read on first use.

    Args:
        read: (name) -> tensor.
        positions: positions of the tensors that are slices.
        where: the file, for messages.
    """

    def __init__(self, read: Callable[[str], Tensor], positions: Mapping[str, SlicePosition], where: object):
        self._read, self._positions, self._where = read, positions, where

    def decode(self, node: Any) -> Any:
        """Return the state that a node of the tree represents; raise CheckpointError if it is not from `encode`."""
        with understood(self._where):
            return self._decode(node, cache(self._read))  # equal views are one tensor again

    def _decode(self, node: Any, read: Callable[[str], Tensor]) -> Any:
        """Decode a node recursively: a dict whose key starts with "$" is another type, others are themselves."""
        if isinstance(node, list):
            return [self._decode(item, read) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self._decode(item, read) for key, item in node.items()}
        content = node[tag]
        if tag == "$tensor":
            return read(content)
        if tag == "$complex":
            return torch.view_as_complex(read(content))
        if tag == "$slice":
            (name,) = content.values()
            return Slice(self._positions[name], lambda: self.decode(content))
        if tag == "$int":
            return int(content, 16)
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if tag == "$bytes":
            return base64.b64decode(content)
        decoded = self._decode(content, read)
        if tag == "$tuple":
            return tuple(decoded)
        if tag == "$array":
            return decoded.numpy()
        if tag == "$scalar":
            return decoded.numpy()[()]
        return (Counter if tag == "$counter" else dict)(dict(decoded))


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _refusal(path: str, value: Any) -> CheckpointError:
    if isinstance(value, Tensor):
        nested = ", nested" if value.is_nested else ""
        got = f"{type(value).__name__} of {value.dtype}, {value.layout}{nested}, on {value.device}"
    else:
        got = f"{_type_name(value)} ({value!r:.60})"
    return CheckpointError(f"{path} {_RULE}; got {got}. Convert it, or remove it from the state.")
