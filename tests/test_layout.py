"""Tensors that can lie in flat memory, later changes that break it, replaced buffers, descriptions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist.comm.chunks import CACHED, alongside
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.slots import describe_difference


class Subclass(torch.Tensor):
    pass


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("odd", tensor)
    return module


# --- refused when wrapping --------------------------------------------------------------------------------------------
@each(
    "case",
    [
        (nn.Sequential(nn.LazyLinear(2)), "'0.weight' must be a dense tensor .* an uninitialised one. Run one batch"),
        (nn.Linear(2, 2, device="meta"), "'weight' must be .* device meta. Materialise the module"),
        (holding(torch.eye(3).to_sparse()), "'odd' must be .* layout torch.sparse_coo. Convert it"),
        (holding(torch.ones(3).as_subclass(Subclass)), "'odd' must be .* a Subclass. Wrap the plain"),
        ([torch.ones(1)], "module must be a torch.nn.Module; got list. Pass the model itself"),
    ],
)
def test_tensors_without_dense_memory_are_refused(case):
    module, message = case
    with pytest.raises(ConfigError, match=message):
        FlatModel(module)


def test_parameters_that_share_memory_without_being_one_object_are_refused():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.data.t())
    with pytest.raises(ConfigError, match="'1.weight' must not share memory; got that of parameter '0.weight'"):
        FlatModel(module)
    module[1].weight = nn.Parameter(torch.ones(3, 3))
    module.register_buffer("alias", module[0].weight.data)
    with pytest.raises(ConfigError, match="'alias' must not share memory"):
        FlatModel(module)


def test_buffers_may_share_memory():
    module, base = nn.Module(), torch.arange(4.0)
    module.register_buffer("long", base)
    module.register_buffer("short", base[:2])
    assert FlatModel(module).buffers[0].tolist() == [0, 1, 2, 3, 0, 1]


# --- broken later ---------------------------------------------------------------------------------------------------
def replaced(module):
    module[0].weight = nn.Parameter(torch.ones(4, 3))


def assigned(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def added(module):
    module.append(nn.Linear(2, 2))


def removed(module):
    del module[2]


@each(
    "case",
    [
        (replaced, "parameters must be the same .* got '0.weight' added, removed or replaced"),
        (assigned, "parameters must be the same .* got '0.weight' added, removed or replaced"),
        (added, "parameters must be the same .* got '3.weight' added"),
        (removed, "parameters must be the same .* got '2.weight' added, removed"),
        (lambda module: module.double(), "'0.weight' must stay torch.float32 of shape .* got torch.float64 of shape"),
        (lambda module: setattr(module[2].bias, "data", torch.ones(3)), "'2.bias' must stay .*(2,).* got .*(3,)"),
    ],
)
def test_a_module_that_has_changed_is_refused_by_name(case):
    change, message = case
    module = net()
    model = FlatModel(module)
    model.refresh()
    change(module)
    with pytest.raises(ConfigError, match=message):
        model.refresh()


@each(
    "move",
    [
        lambda module: module.double().float(),
        lambda module: setattr(module[2].bias, "data", module[2].bias.detach().clone()),
        lambda module: nn.utils.vector_to_parameters(torch.arange(34.0), module.parameters()),
    ],
)
def test_parameters_that_were_given_other_memory_come_back_with_their_values(move):
    module = net()
    model = FlatModel(module)
    memory = model.params[0]
    move(module)
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert [p for p in module.parameters() if p.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()]
    model.refresh()
    assert model.params[0] is memory and torch.equal(memory, expected)
    memory.fill_(3.0)
    assert all((p == 3.0).all() for p in module.parameters())


def test_nothing_is_to_be_said_of_all_that_is_allowed():
    module = net()
    module[0].bias.requires_grad_(False)
    model = FlatModel(module)
    module(torch.ones(2, 3)).sum().backward()
    module.zero_grad()
    module.load_state_dict(net().state_dict())
    module.eval().to("cpu").float()
    module[1].requires_grad_(False)
    with model.swapped([flat.clone() for flat in model.params]):
        model.refresh()
    model.refresh()


# --- buffers ----------------------------------------------------------------------------------------------------------
def test_replaced_buffers_are_taken_back():
    module = net()
    model = FlatModel(module)
    new = torch.arange(4.0, requires_grad=True) * 2
    module[1].running_mean = new
    module[1].running_var.data = torch.full((4,), 5.0)
    model.buffers  # noqa: B018
    assert model.buffers[0].tolist() == [0, 2, 4, 6, 5, 5, 5, 5]
    model.buffers[0].zero_()
    assert (module[1].running_mean == 0).all() and (module[1].running_var == 0).all()
    assert new.tolist() == [0, 2, 4, 6]  # the tensor that the user put there is the user's
    module[1].running_mean = torch.ones(4)
    with model.swapped(buffers=[torch.zeros_like(b) for b in model.buffers]):
        assert not module[1].running_mean.any()
    assert module[1].running_mean.tolist() == [1, 1, 1, 1]


def test_a_tied_buffer_lies_there_once_and_stays_tied():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].running_mean = module[0].running_mean
    model = FlatModel(module)
    assert len(model.buffers[0]) == 6
    module[0].running_mean = module[1].running_mean = torch.ones(2)
    model.buffers  # noqa: B018
    assert module[0].running_mean is module[1].running_mean and model.buffers[0][:2].tolist() == [1, 1]
    module[1].running_mean = torch.zeros(2)
    with pytest.raises(ConfigError, match="'0.running_mean' and '1.running_mean' must stay one tensor, .* got two"):
        model.buffers  # noqa: B018


def test_buffers_of_a_replaced_layer_are_taken_over():
    module = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    model = FlatModel(module)
    module[0] = nn.BatchNorm1d(2, affine=False)
    module[0].running_mean.fill_(3)
    model.buffers  # noqa: B018
    assert model.buffers[0].tolist() == [3, 3, 1, 1]
    with model.swapped(buffers=[torch.zeros_like(b) for b in model.buffers]):
        assert (module[0].running_var == 0).all()
    assert module[0].running_var.tolist() == [1, 1]


@each(
    "case",
    [
        (lambda m: m.register_buffer("late", torch.ones(1)), "buffers must be the same .* got 'late' added or removed"),
        (lambda m: setattr(m[1], "running_var", None), "buffers must be the same .* got '1.running_var' added or"),
        (lambda m: setattr(m[1], "running_var", torch.ones(5)), r"'1.running_var' must stay .*\(4,\) .* got .*\(5,\)"),
        (lambda m: m[1].double(), "'1.running_mean' must stay torch.float32 .* got torch.float64"),
    ],
)
def test_buffers_that_no_longer_fit_are_refused(case):
    change, message = case
    module = net()
    model = FlatModel(module)
    change(module)
    with pytest.raises(ConfigError, match=f"(?s){message}.*pass persistent=False to register_buffer"):
        model.buffers  # noqa: B018


@each("change", ["longer", "resized", "gone", "late", "same"])
def test_a_buffer_that_is_not_persistent_is_left_to_the_module_once_it_is_another(change):
    module = net()
    module.register_buffer("angles", torch.zeros(3), persistent=False)
    model = FlatModel(module)
    before = [len(flat) for flat in model.buffers]
    if change == "late":
        module.register_buffer("mask", torch.ones(2), persistent=False)
    elif change == "resized":
        module.angles.data = torch.ones(5)
    else:
        values = {"longer": torch.ones(5), "gone": None, "same": torch.ones(3)}[change]
        module.register_buffer("angles", values, persistent=False)
    for _ in range(2):
        assert [len(flat) for flat in model.buffers] == before, "places are those of all ranks"
        with model.swapped(buffers=[torch.full_like(flat, 2) for flat in model.buffers]):
            swapped = module.angles
        assert (swapped is None) == (change == "gone")
        if swapped is not None:
            expected = {"longer": [1.0] * 5, "resized": [1.0] * 5}.get(change)
            assert swapped.tolist() == expected if expected else module.angles.data_ptr() == swapped.data_ptr()
    model.gradients.start_batch(0.0)
    model.flat_buffers.restore()
    assert len(model.flat_buffers.tensors()) == len(model.flat_buffers.slots)
    model.close()
    assert (module.angles is None) == (change == "gone") and ("mask" in module._buffers) == (change == "late")


# --- memory -----------------------------------------------------------------------------------------------------------
def test_complex_memory_must_be_aligned():
    module = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    model = FlatModel(module)
    with pytest.raises(ConfigError, match=r"even storage offset .* offset 1. Allocate a separate tensor"):
        with model.swapped((torch.ones(5)[1:],)):
            pass
    with model.swapped((torch.arange(6.0)[2:],)):
        assert module[0].tolist() == [2 + 3j, 4 + 5j]


# --- descriptions -----------------------------------------------------------------------------------------------------
def test_equal_models_have_equal_descriptions_whatever_their_values_and_buckets():
    one, other = FlatModel(net()), FlatModel(net(), bucket_bytes=8)
    assert describe_difference(one.description(), other.description()) is None


@each(
    "case",
    [
        (lambda m: setattr(m, "2", nn.Linear(4, 3)), "2.weight: trainable float32 [3, 4] in group 0"),
        (lambda m: m[2].requires_grad_(False), "2.weight: frozen float32 [2, 4] in group 0"),
        (lambda m: m[2].double(), "2.weight: trainable float64 [2, 4] in group 1"),
    ],
)
def test_the_first_difference_is_named(case):
    change, there = case
    changed = net()
    change(changed)
    one, other = FlatModel(net()), FlatModel(changed)
    expected = f"'2.weight: trainable float32 [2, 4] in group 0' here against '{there}' there"
    assert describe_difference(one.description(), other.description()) == expected
    (longer := net())[1].register_buffer("late", torch.ones(1, dtype=torch.bool))
    expected = "'nothing' here against '1.late: buffer bool [1] in group 2' there"
    assert describe_difference(one.description(), FlatModel(longer).description()) == expected


def test_a_copy_of_the_module_is_independent():
    module = net()
    model = FlatModel(module)
    module(torch.randn(4, 3)).sum().backward()
    twin = copy.deepcopy(module)
    before = [flat.clone() for flat in model.params]
    with torch.no_grad():
        for tensor in [*twin.parameters(), twin[1].running_mean]:
            tensor.fill_(7)
    twin.zero_grad()
    twin(torch.randn(4, 3)).sum().backward()
    assert torch.equal(model.params[0], before[0]) and not (module[1].running_mean == 7).any()
    model.refresh()
    assert FlatModel(twin).description() == model.description()


# --- parts of flat tensors --------------------------------------------------------------------------------------------
@each("count", [0, 1, CACHED, 2 * CACHED + 3])
def test_operations_on_parts_give_the_bits_of_those_on_the_whole(count):
    own, other = torch.randn(count), torch.randn(count, dtype=torch.float64).float()
    expected = own.clone().add_(other).div_(3)
    parts = list(alongside(own, other))
    for mine, theirs in parts:
        assert len(mine) == len(theirs) <= CACHED
        mine.add_(theirs).div_(3)
    assert torch.equal(own, expected) and sum(len(mine) for mine, _ in parts) == count


def test_tensors_of_other_lengths_are_no_parts_of_each_other_and_those_on_a_device_stay_whole():
    with pytest.raises(ValueError, match="zip"):
        list(alongside(torch.zeros(CACHED + 1), torch.zeros(CACHED)))
    own, other = torch.zeros(3 * CACHED, device="meta"), torch.zeros(3 * CACHED)
    (parts,) = alongside(own, other)
    assert parts[0] is own and parts[1] is other
