"""A wrapped module trains to the bit as the plain one does, and its flat memory is its memory."""

from __future__ import annotations

import contextlib
import copy
import io
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem

WIDTH = 3
KINDS = ("linear", "no_bias", "transposed", "tied", "frozen", "norm", "nested", "scalar", "empty", "sparse", "integer")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
few = settings(max_examples=30, deadline=None)
cuda = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
devices = pytest.mark.parametrize("device", ["cpu", cuda])


class Block(nn.Module):
    """One layer of width 3 of a given kind; used in the steps that `period` divides, never where it is 0."""

    def __init__(self, kind: str, dtype: torch.dtype, period: int, earlier: list[Block]):
        super().__init__()
        self.kind, self.dtype, self.period = kind, dtype, period
        if kind in ("linear", "no_bias", "frozen", "tied", "nested"):
            self.layer = nn.Linear(WIDTH, WIDTH, bias=kind != "no_bias", dtype=dtype)
        partner = next((b for b in earlier if hasattr(b, "layer") and b.dtype == dtype), None)
        if kind == "tied" and partner is not None:
            self.layer.weight = partner.layer.weight
        if kind == "frozen":
            self.layer.requires_grad_(False)
        if kind == "nested":
            self.inner = nn.Sequential(Block("norm", dtype, 1, []), nn.Tanh(), Block("scalar", dtype, 1, []))
        if kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype)
        if kind == "sparse":
            self.table = nn.Embedding(4, WIDTH, sparse=True, dtype=dtype)
        shapes = {"transposed": (WIDTH, 2), "scalar": (), "empty": (0, 2)}
        if kind in shapes:
            self.weight = nn.Parameter(torch.randn(shapes[kind], dtype=dtype).t())
        if kind == "integer":
            self.shift = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype)
        if self.kind == "nested":
            return torch.tanh(self.inner(self.layer(x)))
        if hasattr(self, "layer"):
            return torch.tanh(self.layer(x))
        if self.kind == "norm":
            return self.norm(x)
        if self.kind == "transposed":
            return x * self.weight[0] + self.weight[1]
        if self.kind == "sparse":
            return x + self.table(torch.arange(len(x), device=x.device) % 3)
        return x + (self.shift if self.kind == "integer" else self.weight.sum())


class Net(nn.Module):
    def __init__(self, specs: list[tuple[str, torch.dtype, int]]):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList()
        for kind, dtype, period in specs:
            self.blocks.append(Block(kind, dtype, period, list(self.blocks)))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for block in self.blocks:
            if block.period and step % block.period == 0:
                x = block(x)
        return x.double()


specs = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.integers(0, 3)), max_size=6)


def one_of_each(dtype: torch.dtype = torch.float32) -> Net:
    return Net([(kind, dtype, 1) for kind in KINDS])


def bits(tensors) -> list[bytes]:
    return [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def concatenated(tensors) -> list[torch.Tensor]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    return [torch.cat(group) for group in groups.values()]


def assert_flat_is_module(model: FlatModel) -> None:
    parameters = list(model.module.parameters())
    trainable = concatenated(p for p in parameters if p.requires_grad)
    frozen = concatenated(p for p in parameters if not p.requires_grad)
    buffers = concatenated(model.module.buffers())
    for flats, expected in ((model.params, trainable), (model.frozen, frozen), (model.buffers, buffers)):
        assert [f.dtype for f in flats] == [e.dtype for e in expected]
        assert bits(flats) == bits(expected)


# --- values -----------------------------------------------------------------------------------------------------------
@few
@given(specs)
def test_flat_is_the_concatenation_values_stay_and_changes_go_both_ways(specs):
    module = Net(specs)
    objects, before = list(module.parameters()), copy.deepcopy(module)
    model = FlatModel(module)
    assert_flat_is_module(model)
    assert all(p is o for p, o in zip(module.parameters(), objects, strict=True))
    assert bits(module.parameters()) == bits(before.parameters()) and bits(module.buffers()) == bits(before.buffers())
    assert [p.shape for p in module.parameters()] == [p.shape for p in before.parameters()]
    assert all(p.is_contiguous() for p in module.parameters())
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert [slot.name for slot in model.slots] == list(trainable)
    assert sum(flat.nbytes for flat in model.params) == sum(p.nbytes for p in trainable.values())
    assert all(g.shape == p.shape and not g.any() for g, p in zip(model.grads, model.params, strict=True))
    for slot in model.slots:
        assert slot.tensor is trainable[slot.name] and torch.equal(slot.view(model.params), slot.tensor)

    for flat in (*model.params, *model.frozen, *model.buffers):
        flat.add_(1)
    assert_flat_is_module(model)
    with torch.no_grad():
        for tensor in (*model.module.parameters(), *model.module.buffers()):
            tensor.mul_(2)
    assert_flat_is_module(model)
    for loaded in (copy.deepcopy(model.module.state_dict()), Net(specs).state_dict()):
        model.module.load_state_dict(loaded)
        assert bits(model.module.state_dict().values()) == bits(loaded.values())
        assert_flat_is_module(model)
    model.refresh()


def test_modules_without_parameters_work():
    model = FlatModel(nn.Tanh())
    seen = []
    model.gradients.on_bucket = seen.append
    model.gradients.announce()
    used = model.gradients.collect(last=True)
    model.gradients.release(used)
    with model.swapped([flat.clone() for flat in model.params], []):
        model.refresh()
    assert model.params == model.grads == model.frozen == model.buffers == model.gradients.buckets == ()
    assert used.shape == (0,) and seen == problem.nonfinite(model) == model.slots == []


def test_channels_last_keeps_values_and_becomes_row_major():
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    before, x = conv.weight.detach().clone(), torch.randn(2, 3, 5, 5)
    expected = conv(x)
    FlatModel(conv)
    assert torch.equal(conv.weight, before) and conv.weight.is_contiguous()
    torch.testing.assert_close(conv(x), expected)


def test_complex_parameters_lie_there_as_real_pairs_and_train_as_plain_ones():
    flat, plain = (nn.ParameterList([nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))]) for _ in range(2))
    model = FlatModel(flat, bucket_bytes=8)
    assert model.params[0].tolist() == [1, 2, 3, -1]
    for module in (flat, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        (module[0] * (2 + 1j)).abs().sum().backward()
        optimizer.step()
    assert bits(flat.parameters()) == bits(plain.parameters())
    assert model.params[0].tolist() == torch.view_as_real(plain[0].detach()).flatten().tolist()
    assert model.gradients.buckets[0].grads.tolist() == torch.view_as_real(plain[0].grad).flatten().tolist()


# --- training ---------------------------------------------------------------------------------------------------------
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def train(module, optimizer, model=None, *, set_to_none, passes, announce=False, device="cpu"):
    """Ten steps of `passes` backward passes each; through `model` as a strategy on one rank would."""
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        optimizer.zero_grad(set_to_none=set_to_none)
        for k in range(passes):
            if model:
                model.gradients.announce(early=announce and k == passes - 1)
            x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(device)
            loss = module(x, step).square().mean()
            if loss.requires_grad:
                loss.backward()
        if model:
            model.gradients.release(model.gradients.collect(last=True) if announce else model.gradients.collect())
        optimizer.step()


def align_like(plain: nn.Module, wrapped: nn.Module) -> None:
    """Gives each parameter memory of its own at its twin's address modulo 64, on which MKL's last bits depend."""
    for p, twin in zip(plain.parameters(), wrapped.parameters(), strict=True):
        if p.numel():
            room = torch.empty(p.numel() * p.element_size() + 64, dtype=torch.uint8, device=p.device)
            offset = (twin.data_ptr() - room.data_ptr()) % 64
            memory = room[offset : offset + p.numel() * p.element_size()].view(p.dtype).view(p.shape)
            p.data = memory.copy_(p.data)


def assert_same_run(plain, wrapped, optimizer, train, *, align=True):
    """Both modules, equal so far, end with the same bits. `train(module, optimizer, model)` trains one of them."""
    model = FlatModel(wrapped, bucket_bytes=40)
    if align:
        align_like(plain, wrapped)
    made = [OPTIMIZERS[optimizer](module.parameters()) for module in (plain, wrapped)]
    train(plain, made[0], None)
    train(wrapped, made[1], model)
    assert bits(plain.parameters()) == bits(wrapped.parameters())
    assert bits(plain.buffers()) == bits(wrapped.buffers())
    states = [optimizer.state_dict()["state"] for optimizer in made]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        assert [bits([torch.as_tensor(v)]) for k, v in sorted(states[0][key].items()) if v is not None] == [
            bits([torch.as_tensor(v)]) for k, v in sorted(states[1][key].items()) if v is not None
        ]
    assert [p.grad is None for p in plain.parameters()] == [p.grad is None for p in wrapped.parameters()]
    assert_flat_is_module(model)
    model.refresh()


def assert_trains_as_plain(specs, optimizer, device="cpu", **how):
    plain = Net(specs).to(device)
    if any(True for _ in plain.parameters()):
        assert_same_run(plain, copy.deepcopy(plain), optimizer, partial(train, device=device, **how))


dense = specs.map(lambda drawn: [spec for spec in drawn if spec[0] != "sparse"])
how = {"set_to_none": st.booleans(), "passes": st.integers(1, 3), "announce": st.booleans()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=15, deadline=None)
@given(specs=dense, **how)
def test_ten_steps_are_bitwise_those_of_the_plain_module(optimizer, specs, set_to_none, passes, announce):
    assert_trains_as_plain(specs, optimizer, set_to_none=set_to_none, passes=passes, announce=announce)


@devices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mixed_precision_model_trains_as_plain(optimizer, device):
    specs = [("linear", dtype, 1) for dtype in DTYPES] + [("no_bias", torch.float32, 3), ("norm", torch.bfloat16, 1)]
    assert_trains_as_plain(specs, optimizer, device, set_to_none=True, passes=2, announce=True)


@devices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_wide_layers_train_as_plain(optimizer, autocast, device):
    def train(module, optimizer, model):
        generator = torch.Generator().manual_seed(1)
        for step in range(10):
            optimizer.zero_grad()
            x = torch.randn(1 + 4 * (step % 2), width, generator=generator).to(device)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                loss = module(x).float().square().mean()
            loss.backward()
            if model:
                model.gradients.release(model.gradients.collect())
                assert [grads.dtype for grads in model.grads] == [torch.float32]
            optimizer.step()

    # Width 16 against a module that nobody touched, as all offsets are multiples of 64 bytes; 17 aligned like it.
    for width, align in ((16, False), (17, True)):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
        assert_same_run(plain, copy.deepcopy(plain), optimizer, train, align=align)


# --- other values for a while -----------------------------------------------------------------------------------------
@few
@given(specs, st.booleans())
def test_swapped_values_end_with_the_context_to_the_bit(specs, fails):
    module = Net(specs)
    model = FlatModel(module)
    mine, memory = bits((*module.parameters(), *module.buffers())), model.params
    params = [p.new_full(p.shape, 2) for p in model.params]
    buffers = [b.new_full(b.shape, 1) for b in model.buffers]
    with contextlib.suppress(ZeroDivisionError), model.swapped(params, buffers):
        assert all((p == 2).all() for p in module.parameters() if p.requires_grad)
        assert all((b == 1).all() for b in module.buffers())
        assert bits(memory) == bits(concatenated(p for p in Net(specs).parameters() if p.requires_grad))
        module(torch.randn(4, WIDTH), 0)  # changes batch-norm statistics
        for flat in model.params:
            flat.zero_()
        for owner in module.modules():
            if isinstance(owner, nn.BatchNorm1d):
                owner.running_mean, owner.running_var = torch.zeros(WIDTH), None
        1 / (0 if fails else 1)
    assert bits((*module.parameters(), *module.buffers())) == mine
    assert all(p is m for p, m in zip(model.params, memory, strict=True))
    model.buffers  # noqa: B018
    assert_flat_is_module(model)


def test_values_that_do_not_fit_are_refused():
    model = FlatModel(nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="params must be 1 flat tensors, one per group; got 0"), model.swapped([]):
        pass
    found = r"params, group 0, must be torch.float32 of shape \(4,\); got .* \(3,\)"
    with pytest.raises(ConfigError, match=found), model.swapped([torch.ones(3)]):
        pass
    with pytest.raises(ConfigError, match=r"params, group 0, must be contiguous"), model.swapped([torch.ones(8)[::2]]):
        pass
    with pytest.raises(ConfigError, match="buffers must be 2 flat tensors"), model.swapped(buffers=[]):
        pass
    model.refresh()


# --- the module on its own --------------------------------------------------------------------------------------------
def test_a_closed_model_leaves_a_plain_module():
    module = one_of_each()
    model = FlatModel(module)
    before = bits(module.parameters())
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    assert bits(torch.load(file).values()) == bits(module.state_dict().values()), "it can be saved before, too"
    model.gradients.announce()
    model.gradients.collect(last=True)
    model.close()
    model.close()
    module(torch.ones(4, WIDTH), 0).sum().backward()  # not refused as too late, not copied
    assert not model.grads[0].any()
    assert bits(module.parameters()) == before
    wrapped_again = FlatModel(module)
    module.zero_grad()
    module(torch.ones(4, WIDTH), 0).sum().backward()
    assert wrapped_again.grads[0].any() and not model.grads[0].any()
