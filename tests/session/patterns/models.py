"""Models whose tensors the loop looks at, shares, averages, replaces or freezes."""

from __future__ import annotations

import copy
import itertools
import warnings

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import hpcdist as hd
from patterns.run import (
    EPOCHS,
    Table,
    copied,
    data,
    difference,
    enter,
    mse,
    net,
    pattern,
    renewed,
    sgd,
    train,
    training,
)

UNFROZEN = "a frozen layer is unfrozen"
OVERWRITTEN = {"breaks": "parameters are changed between steps"}


# --- how a model is run -----------------------------------------------------------------------------------------------
@training(ways=("joint", "one", "same"))
def compiled(run, model, optimizer):
    """The plain model is wrapped, its compiled one is run."""
    torch._dynamo.reset()
    fast = torch.compile(model, backend="eager")
    train(run, fast, optimizer, run.loader(), epochs=1)


def _compiled():
    torch._dynamo.reset()
    return torch.compile(net(), backend="aot_eager")


enter("compiled_before_it_is_wrapped", model=_compiled, epochs=1, ways=("joint",), where=("allreduce",))


def scripted(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated with some versions of Python
        return torch.jit.script(model)


enter("scripted", model=lambda: scripted(net()), epochs=1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(5, 8), nn.Linear(8, 1), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_() if self.reentrant else x
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.reentrant)
        return checkpoint(self.last, hidden, use_reentrant=self.reentrant)


enter("activation_checkpointing", model=lambda: renewed(Checkpointed(False).double()))
enter(
    "activation_checkpointing_reentrant", model=lambda: renewed(Checkpointed(True).double()),
    ways=("joint", "one", "same"),
)  # fmt: skip
enter("dropout", model=lambda: net(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)), lr=0.02, exact=False)


class Branches(nn.Module):
    """A part that only some batches take."""

    def __init__(self):
        super().__init__()
        self.trunk, self.often, self.seldom, self.never = (nn.Linear(5, n) for n in (3, 1, 1, 1))
        self.head, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, seldom: bool):
        hidden = torch.tanh(self.trunk(x))
        return self.other(hidden) if seldom else self.head(hidden)


def _branching(name, seldom, **given):
    """Batches of which some, by their number and the rank, take the branch."""

    def loop(run, model, optimizer):
        for _ in range(EPOCHS):
            number = itertools.count()
            train(
                run, model, optimizer, run.loader(), 1,
                backward=lambda x, y: mse(model(x, seldom=seldom(next(number), run.rank)), y).backward(),
            )  # fmt: skip

    loop.__name__ = name
    training(momentum=0.9, model=lambda: renewed(Branches().double()), **given)(loop)


_branching("a_branch_taken_in_some_steps", lambda i, rank: i % 3 == 1, weight_decay=0.1)
_branching("a_branch_taken_on_some_ranks", lambda i, rank: (i + rank) % 3 == 1, exact=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.cells(x.unsqueeze(-1))[0][:, -1])


enter("a_recurrent_layer", model=lambda: renewed(Recurrent().double()), momentum=0.9, epochs=1, tolerance=1e-10)


def _normalised():
    model = net(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8).double()), nn.Tanh(), nn.Linear(8, 1))
    for buffer in model.buffers():
        buffer.copy_(nn.functional.normalize(torch.arange(1.0, 1.0 + len(buffer)), dim=0))
    return model


# Its buffers change in each forward pass by the weights alone, the same on all ranks that have the same ones.
enter(
    "spectral_norm", model=_normalised, dataset=lambda: data(24),
    ways=("joint", "one", "same"), tolerance=1e-9, inexact=("easgd",),
)  # fmt: skip
enter(
    "a_model_in_bfloat16", model=lambda: net(dtype=torch.bfloat16), lr=0.02,
    dataset=lambda: data(dtype=torch.bfloat16), exact=False,
)  # fmt: skip
# Its forward pass changes the rows of this rank's batch.
enter(
    "an_embedding_with_a_largest_norm", model=lambda: net(Table(max_norm=0.5)),
    breaks="embeddings are normalised in the forward pass",
)  # fmt: skip


class Target(nn.Module):
    """A slow copy beside the model, as in BYOL or MoCo."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(5, 1), nn.Linear(5, 1).requires_grad_(False)

    def forward(self, x):
        return self.online(x) + 0.1 * self.target(x)

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.lerp_(fast, 0.1)


@training(0.05, model=lambda: renewed(Target().double()), inexact=("easgd",))
def a_slow_copy_that_follows(run, model, optimizer):
    train(run, model, optimizer, run.loader(data(24)), after=model.follow)
    with run.consensus(model):
        inside = copied(model)
    run.finish(model)
    assert run.size == 1 or difference(inside, copied(model)) == 0.0
    return model


# --- parameters -------------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.out(torch.tanh(self.last(torch.tanh(self.first(x)))))


@training(momentum=0.9, model=lambda: renewed(Tied().double()))
def tied_weights(run, model, optimizer):
    train(run, model, optimizer, run.loader())
    assert model.last.weight is model.first.weight


def _groups(model):
    parts = [[p for p in model.parameters() if (p.dim() > 1) == weights] for weights in (True, False)]
    groups = [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 0.2}]
    return SGD(groups, lr=0.05, momentum=0.9)


enter("parameter_groups", make=_groups)
enter("a_part_of_the_model_in_the_optimizer", make=lambda model: SGD(model[2].parameters(), lr=0.1))


@pattern(exact=False, breaks="a plain optimiser trains the rest of the model")
def the_rest_of_the_model_in_a_plain_optimizer(run):
    model = net()
    optimizer, plain = run.optimizer(SGD(model[0].parameters(), lr=0.1), model), SGD(model[2].parameters(), lr=0.1)
    train(run, model, model, run.loader, step=lambda: (optimizer.step(), plain.step()))
    return run.finish(model)


@training(exact=False, breaks="parameters are put into a group by hand")
def parameters_put_into_a_group_by_hand(run, model, optimizer):
    shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer.param_groups[0]["params"].append(shift)
    train(run, lambda x: model(x) + shift, optimizer, run.loader(), 1)


@training(
    make=lambda model: SGD(model[0].parameters(), lr=0.1), exact=False, breaks="parameters are put into a group by hand"
)
def another_part_of_the_model_put_into_the_group(run, model, optimizer):
    """Of as many parameters, as blocks that are trained by turns."""
    optimizer.param_groups[0]["params"] = [*model[2].parameters()]
    train(run, model, optimizer, run.loader(), 1)


def _frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


def _unfrozen(model, momentum=0.9):
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=momentum)


enter("a_frozen_layer", model=_frozen, make=_unfrozen)
enter(
    "a_layer_frozen_later", momentum=0.9, weight_decay=0.1, epochs=3,
    start=lambda model, epoch: model[0].requires_grad_(epoch != 1),
)  # fmt: skip
enter(
    "a_layer_unfrozen_later", model=_frozen, momentum=0.9, breaks=UNFROZEN,
    start=lambda model, epoch: model[0].requires_grad_(epoch > 0),
)  # fmt: skip


@training(model=_frozen, make=_unfrozen, breaks=(UNFROZEN, "a group of parameters is added"))
def a_layer_unfrozen_later_and_added_then(run, model, optimizer):
    for epoch in range(EPOCHS):
        if epoch == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        train(run, model, optimizer, run.loader(), epochs=1)


@training()
def values_loaded_between_epochs(run, model, optimizer):
    first = copy.deepcopy(model.state_dict())
    for _ in range(3):
        train(run, model, optimizer, run.loader(), epochs=1)
        model.load_state_dict({k: 0.9 * v + 0.1 * first[k] for k, v in model.state_dict().items()})


def _assign(model, epoch):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=epoch > 0)


OTHER_TENSORS = r"the module's (parameters|buffers) must be the same as when it was wrapped; got "
enter("values_assigned", start=_assign, refused={"*": OTHER_TENSORS + ".*assign=True"})


@torch.no_grad()
def _clamp(model):
    for p in model.parameters():
        p.clamp_(-0.3, 0.3)


def _give_other_memory(model):
    for p in model.parameters():
        p.data = p.data.clamp(-0.3, 0.3)


enter("values_changed_in_place", after=_clamp, **OVERWRITTEN)
enter("values_given_other_memory", after=_give_other_memory, **OVERWRITTEN)


@training(**OVERWRITTEN)
def values_loaded_within_an_epoch(run, model, optimizer):
    first = copy.deepcopy(model.state_dict())
    for _ in range(EPOCHS):
        number = itertools.count()
        load = lambda: model.load_state_dict(first) if next(number) == 1 else None  # noqa: E731
        train(run, model, optimizer, run.loader(), 1, after=load)


OTHERS = r"parameters must be the same on all ranks with \w+; those of rank [12] differ from rank 0's"


def _halve_on_rank_0(run, model):
    if run.rank == 0:
        model.load_state_dict({k: 0.5 * v for k, v in model.state_dict().items()})


@training(ways=("joint", "many"), exact=False, refused={"*": OTHERS})
def values_loaded_on_rank_0_only(run, model, optimizer):
    _halve_on_rank_0(run, model)
    train(run, model, optimizer, run.loader())


@training(where=("allreduce",), ways=("joint",), exact=False, breaks="replicas differ")
def values_loaded_on_rank_0_only_between_epochs(run, model, optimizer):
    train(run, model, optimizer, run.loader(), epochs=1)
    _halve_on_rank_0(run, model)
    train(run, model, optimizer, run.loader(), epochs=1)


@training(ways=("joint", "one", "same"))
def values_loaded_on_rank_0_and_broadcast(run, model, optimizer):
    _halve_on_rank_0(run, model)
    if run.size > 1:
        hd.broadcast(model)
    train(run, model, optimizer, run.loader())


enter("converted_there_and_back", start=lambda model, epoch: model.float().double(), tolerance=1e-5)


@training(refused={"*": r"parameter '0.weight' must stay torch.float64 of shape .* got torch.float32.*before wrap"})
def converted_later(run, model, optimizer):
    train(run, model, optimizer, run.loader(), epochs=1)
    model.float()
    train(run, model, optimizer, run.loader(data(dtype=torch.float32)), epochs=1)


enter(
    "a_layer_added_later", refused={"*": OTHER_TENSORS + r"'3\.|new layer"},
    start=lambda model, epoch: model.append(nn.Linear(1, 1).double()) if epoch else None,
)  # fmt: skip


# --- averages of the model --------------------------------------------------------------------------------------------
@training(where=("allreduce",), ways=("joint",))
def ema_of_torch(run, model, optimizer):
    """Of the models that the ranks have after each step; with replicas that differ it is each rank's own."""
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(run, model, optimizer, run.loader, after=lambda: ema.update_parameters(model))
    run.finish(model)
    run.before = []
    return ema.module


@training(
    ways=("joint", "one", "same"), where=("allreduce", "hardsync", "gossip_sync", "local_sgd", "parameter_server")
)
def ema_swapped_in_for_evaluation(run, model, optimizer):
    """Values by p.data, and back."""
    shadow = [p.detach().clone() for p in model.parameters()]

    def follow():
        for own, p in zip(shadow, model.parameters()):
            own.lerp_(p.detach(), 0.1)

    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), 1, after=follow)
        kept = [p.data for p in model.parameters()]
        for p, own in zip(model.parameters(), shadow):
            p.data = own
        with torch.no_grad():
            mse(model(data(8).tensors[0]), data(8).tensors[1])
        for p, own in zip(model.parameters(), kept):
            p.data = own


# --- buffers ----------------------------------------------------------------------------------------------------------
def _batch_norm():
    return net(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def _train_and_evaluate(name, model=_batch_norm, samples=30, **given):
    def loop(run, model, optimizer):
        for _ in range(EPOCHS):
            model.train()
            train(run, model, optimizer, run.loader(data(samples)), epochs=1)
            model.eval()
            model(data(8).tensors[0])

    loop.__name__ = name
    training(0.05, model=model, **given)(loop)


_train_and_evaluate("batch_norm", exact=False, ways=("joint", "one", "many"))
_train_and_evaluate("batch_norm_alone", samples=28, ways=("one", "same"))
_train_and_evaluate(
    "scripted_with_batch_norm", lambda: scripted(_batch_norm()),
    ways=("joint", "many"), exact=False, where=("allreduce", "gossip_sync"),
)  # fmt: skip


@pattern(ways=("joint", "many"), breaks="the model has SyncBatchNorm", tolerance=1e-11)
def sync_batch_norm_with_uneven_data(run):
    model = _batch_norm()
    if run.size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    train(run, model, sgd(run, model, 0.05), run.loader(data(30)))
    return run.finish(model)


class Mean(nn.Module):
    """A running mean that is replaced, as people write it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0).detach()
        return self.inner(x - self.mean)


enter("a_buffer_replaced", model=lambda: renewed(Mean().double()), ways=("one", "same", "many"))
enter(
    "a_buffer_registered_late", refused={"*": OTHER_TENSORS + "'late' added or removed"},
    start=lambda model, epoch: model.register_buffer("late", torch.zeros(2)) if epoch else None,
)  # fmt: skip


# --- several models ---------------------------------------------------------------------------------------------------
class Loss(nn.Module):
    """With a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, output, y):
        return mse(output, y) * torch.exp(-self.scale) + self.scale


@pattern()
def a_loss_with_parameters(run):
    model, loss = net(), Loss()
    optimizer = run.optimizer(SGD([*model.parameters(), *loss.parameters()], lr=0.1), model)
    train(run, model, optimizer, run.loader(), loss=loss)
    run.finish(model)
    return nn.ModuleList([model, loss])


@pattern()
def two_optimizers_on_one_model(run):
    model = net()
    one = run.optimizer(SGD(model[0].parameters(), lr=0.1), model)
    two = run.optimizer(torch.optim.Adam(model[2].parameters(), lr=0.01), model)
    train(run, model, model, run.loader, step=lambda: (one.step(), two.step()))
    run.rates = []
    return run.finish(model)


@pattern()
def two_optimizers_by_turns(run):
    model = net()
    one = run.optimizer(SGD(model[0].parameters(), lr=0.1), model)
    two = run.optimizer(SGD(model[2].parameters(), lr=0.05), model)
    turns = itertools.cycle((two, one))
    train(run, model, model, run.loader, step=lambda: next(turns).step())
    run.rates = []
    return run.finish(model)


@pattern()
def gan(run):
    generator, critic = net(nn.Linear(5, 5)), net()
    make = run.optimizer(SGD(generator.parameters(), lr=0.05), generator)
    judge = run.optimizer(torch.optim.Adam(critic.parameters(), lr=0.01), critic)
    for _ in range(EPOCHS):
        for x, _y in run.loader():
            judge.zero_grad()
            (critic(generator(x).detach()).mean() - critic(x).mean() + critic(x).square().mean()).backward()
            judge.step()
            make.zero_grad()
            (-critic(generator(x)).mean()).backward()
            make.step()
    run.rates = []
    run.finish(generator, critic)
    return nn.ModuleList([generator, critic])


@pattern(inexact=("easgd",))
def two_trainings_one_after_the_other(run):
    for _ in range(2):
        model = net()
        train(run, model, sgd(run, model), run.loader(), epochs=1)
        run.finish(model)
    optimizer = run.optimizer(SGD(model.parameters(), lr=0.05), model)
    train(run, model, optimizer, run.loader(), epochs=1)
    run.before = []
    return run.finish(model)


@pattern()
def two_trainings_the_first_of_which_is_not_finished(run):
    for _ in range(2):
        model = net()
        train(run, model, sgd(run, model), run.loader(), epochs=1)
    run.rates = []
    return run.finish(model)


def _narrow():
    return net(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _left_in_evaluation(name, part, ranks, **given):
    """Puts a loop into the table that evaluates between epochs, and trains on without train()."""

    def loop(run, model, optimizer):
        for _ in range(3):
            train(run, model, optimizer, run.loader(), 1)
            if run.rank in ranks(run):
                part(model).eval()

    loop.__name__ = name
    training(0.02, model=_narrow, exact=False, **given)(loop)


_left_in_evaluation("eval_on_all_ranks", lambda model: model, lambda run: range(run.size))
for what, part in (("the_model", lambda model: model), ("a_layer", lambda model: model[1])):
    _left_in_evaluation(
        f"eval_of_{what}_on_one_rank", part, lambda run: [run.size - 1],
        breaks="ranks train in different modes", ways=("joint", "same", "many"),
    )  # fmt: skip


@training(0.02, model=_narrow, exact=False)
def eval_on_one_rank_before_train(run, model, optimizer):
    """What counts is the mode in which steps are taken."""
    for _ in range(2):
        for batch in run.loader():
            model.train()
            train(run, model, optimizer, [batch], 1)
        if run.rank == run.size - 1:
            model.eval()
