"""Values that a state may hold come back to the bit; others are refused, with their place."""

from __future__ import annotations

import enum
import math
import os
import struct
import warnings
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from states import bits, loaded, save_alone, through_a_file

from harness.cases import each
from hpcdist.checkpoint.tensors import STORED, export
from hpcdist.errors import CheckpointError, OutputError

floats = st.floats() | st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack(">d", data)[0])
scalars = (
    st.none() | st.booleans() | st.integers() | floats | st.text(st.characters(), max_size=6) | st.binary(max_size=6)
)
keys = st.none() | st.booleans() | st.integers() | st.text("$tensor", max_size=7) | st.tuples(st.integers(), st.text())
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from([*STORED, torch.complex64, torch.complex128]), shapes, st.integers(0, 9),
)  # fmt: skip
arrays = st.builds(
    lambda dtype, shape, fill: np.full(shape, fill, dtype=dtype),
    st.sampled_from(["f8", "f4", "f2", "i8", "i1", "u8", "u4", "u1", "?", "c16"]), shapes, st.integers(0, 1),
)  # fmt: skip
leaves = (
    scalars | tensors | arrays | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), np.float64("nan")])
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=2).map(Counter)
    ),
    max_leaves=10,
)


@settings(max_examples=30)
@given(state=states)
def test_a_state_comes_back_to_the_bit(tmp_path_factory, state):
    assert bits(through_a_file(tmp_path_factory.mktemp("state"), state)) == bits(state)


ODD_NAN = struct.unpack(">d", bytes.fromhex("fff0000000000abc"))[0]


def test_awkward_values_come_back(tmp_path):
    state = {
        "deep": nested(97),
        "floats": [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, ODD_NAN],
        "integers": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000],
        "text": ["", "\ud800", "\0", "é\n'\"", "$tensor"],
        "dicts": [{}, {"$tensor": "x"}, {"$": 1}, {1: 1, "1": 2, None: 3, 2.5: 4}, {(): 0, (1, ("a", None)): 1}],
        "empty": [(), [], b"", torch.empty(0), torch.empty(3, 0, dtype=torch.bfloat16), np.empty((2, 0), np.int16)],
        (1, math.inf): [torch.tensor(3.0), np.array(7, np.uint16)],
    }  # fmt: skip
    assert bits(through_a_file(tmp_path, state)) == bits(state)
    for alone in (None, 3, [torch.ones(2)], torch.ones(2)):
        assert bits(through_a_file(tmp_path, alone)) == bits(alone)


def test_tensors_that_cannot_be_told_apart_by_their_place_are_kept_apart(tmp_path):
    state = {
        float("nan"): torch.zeros(1), float("nan"): torch.ones(1), (np.int8(1),): 1, (np.int8(2),): 2,
    }  # fmt: skip
    assert len(state) == 4
    assert bits(through_a_file(tmp_path, state)) == bits(state)


def test_subclasses_and_views_come_back_as_plain_values(tmp_path):
    state = [
        OrderedDict(b=1, a=2), torch.Size([2, 3]), torch.nn.Parameter(torch.ones(2)), np.arange(4)[::-1],
        np.arange(3, dtype=">f4"), torch.arange(6.0).reshape(2, 3).t(), torch.ones(1).expand(3),
        torch.tensor([1j]).conj(), np.broadcast_to(np.float32(2), (2,)),
    ]  # fmt: skip
    expected = [
        {"b": 1, "a": 2}, (2, 3), torch.ones(2), np.array([3, 2, 1, 0]), np.arange(3, dtype="f4"),
        torch.tensor([[0.0, 3], [1, 4], [2, 5]]), torch.ones(3),
        torch.tensor([1j]).conj_physical(), np.full(2, 2, np.float32),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bits(through_a_file(tmp_path, state)) == bits(expected)


def test_equal_views_are_stored_once_and_are_one_tensor_again(tmp_path):
    weight = torch.arange(100_000.0)
    state = {
        "a": weight, "tied": torch.nn.Parameter(weight), "detached": weight.detach(), "array": weight.numpy(),
        "half": weight[:50_000], "int": weight.view(torch.int32), "square": weight.reshape(100, 1000),
        "phase": torch.complex(weight, weight),
    }  # fmt: skip
    state["conjugate"] = state["phase"].conj()
    path = save_alone(tmp_path, 1, state)
    back = loaded(path)[0]
    assert back["a"] is back["tied"] is back["detached"]
    assert np.shares_memory(back["a"].numpy(), back["array"])
    stored = (400_000 * 3) + 200_000 + 2 * 800_000
    assert stored < (path / "rank-0000.safetensors").stat().st_size < stored + 2000
    assert bits(back) == bits({name: value.detach() if name == "tied" else value for name, value in state.items()})


Pair = namedtuple("Pair", "a b")
Colour = enum.IntEnum("Colour", "RED")


class Subclass(torch.Tensor):
    pass


class Text(str):
    pass


def nested(depth):
    state = [torch.ones(1)]
    for _ in range(depth):
        state = [state]
    return state


def loop():
    state = {}
    state["self"] = state
    return state


def ragged():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


@each(
    "case",
    [
        (len, "builtin_function_or_method (<built-in function len>)"),
        ({1, 2}, "set ({1, 2})"),
        (1j, "complex (1j)"),
        (Path("x"), "pathlib"),
        (Pair(1, 2), "test_checkpoint_state.Pair (Pair(a=1, b=2))"),
        (Colour.RED, "test_checkpoint_state.Colour (<Colour.RED: 1>)"),
        (Text("x"), "test_checkpoint_state.Text ('x')"),
        (torch.float32, "torch.dtype (torch.float32)"),
        (torch.ones(2).to_sparse(), "Tensor of torch.float32, torch.sparse_coo, on cpu"),
        (torch.ones(2, device="meta"), "Tensor of torch.float32, torch.strided, on meta"),
        (torch.ones(2).as_subclass(Subclass), "Subclass of torch.float32"),
        (torch.empty(2, dtype=torch.bits8), "Tensor of torch.bits8, torch.strided, on cpu"),
        (ragged(), "Tensor of torch.float32, torch.strided, nested, on cpu"),
        (np.array(["a"]), "numpy.ndarray (array(['a']"),
        (np.array([None]), "numpy.ndarray (array([None]"),
        (np.datetime64("2024-01-01"), "numpy.datetime64"),
        (np.str_("a"), "numpy.str_"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.ma.array([1]), "numpy.ma"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_stored_is_told_with_its_place(tmp_path, case):
    value, got = case
    with pytest.raises(CheckpointError) as caught:
        save_alone(tmp_path, 3, {"optimizer": [{"fn": value}]})
    message = str(caught.value)
    assert message.startswith("The checkpoint of step 3 must be saved by all ranks; got state['optimizer'][0]")
    assert "state['optimizer'][0]['fn'] must be None, a bool, int," in message and f"; got {got}" in message
    assert message.endswith("Convert it, or remove it from the state.")
    assert os.listdir(tmp_path) == []


@each(
    "case",
    [
        (nested(101), r"state(\[0\]){101} must be nested at most 100 deep; got more"),
        (loop(), r"state(\['self'\]){101} must be nested at most 100 deep; got more. Does the state contain itself"),
        ({"a": {b"k": 1}}, r"state\['a'\] must have keys that are None or of type str, .*; got b'k' \(bytes\). Conv"),
        ({(1, b"k"): {frozenset(): 2}}, r"state\[\(1, b'k'\)\] must have keys .*; got frozenset\(\) \(frozenset\)"),
        ({np.int64(1): 1}, r"state must have keys .* \(numpy.int64\)"),
    ],
)  # fmt: skip
def test_a_tree_that_cannot_be_stored_is_refused(tmp_path, case):
    state, message = case
    with pytest.raises(CheckpointError, match=message):
        save_alone(tmp_path, 0, state)


def test_others_can_read_the_tensors_by_their_place(tmp_path):
    state = {
        "model": {"weight": torch.randn(3, 2, dtype=torch.bfloat16), "mask": torch.tensor([True])},
        5: [torch.arange(3)],
    }
    path = save_alone(tmp_path, 0, state)
    with safe_open(path / "rank-0000.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    assert bits(dict(sorted(found.items()))) == bits({
        "state['model']['mask']": state["model"]["mask"],
        "state['model']['weight']": state["model"]["weight"],
        "state[5][0]": state[5][0],
    })  # fmt: skip


def test_what_can_not_be_exported_is_said_by_the_file_s_name(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.pt").mkdir()
    for name in ("none/it.pt", "none/it.safetensors", "file/it.pth", "folder.pt"):
        with pytest.raises(OutputError, match=f"{tmp_path / name} must be written; got '.*'. Write elsewhere."):
            export({"weight": torch.zeros(3)}, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.pt"]


def test_tensors_of_all_types_that_the_installed_library_reads_are_exported(tmp_path):
    bytes_of = {kind: torch.empty(0, dtype=kind).element_size() for kind in STORED}
    state = {str(kind): torch.randint(0, 2, (2, 3 * n), dtype=torch.uint8).view(kind) for kind, n in bytes_of.items()}
    export(state, tmp_path / "all.safetensors")
    read = load_file(tmp_path / "all.safetensors")
    assert {name: bits(each) for name, each in read.items()} == {name: bits(each) for name, each in state.items()}
    assert {torch.complex64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2} <= STORED.keys()
