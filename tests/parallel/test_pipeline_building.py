"""Stages are built where they live: with the unsplit model's values, from any form of a model, in a part's memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.cases import each
from harness.pipelines import SEED, assert_close, linear, make_pipeline, merged, piped, samples, whole
from hpcdist.parallel import Chain
from hpcdist.parallel.layers import build

loss_of = nn.functional.mse_loss
pytestmark = pytest.mark.computes


# --- forms of a model -------------------------------------------------------------------------------------------------
FORMS = {
    "Sequential": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), linear()),
    "list": lambda: [linear(), nn.Tanh(), linear(), linear()],
    "ModuleList": lambda: nn.ModuleList([linear(), nn.Tanh(), linear(), linear()]),
    "Chain": lambda: Chain([linear(), nn.Tanh(), linear(), linear()]),
}


@pytest.mark.sizes(1, 2)
@each("form", FORMS)
def test_a_function_and_a_model_of_any_form_are_the_same(ranks, form):
    """Of a model itself each rank keeps its layers. Names are those of nn.Sequential."""
    make, (x, y) = FORMS[form], samples()

    def body(comm):
        torch.manual_seed(SEED)
        model = make()
        return piped(comm, make, loss_of, x, y), piped(comm, model, loss_of, x, y)

    expected = whole(FORMS["Sequential"], loss_of, x, y)
    for outcomes in zip(*ranks(body), strict=True):
        assert_close(merged(outcomes), expected, 1e-12)


# --- initial values ---------------------------------------------------------------------------------------------------
class Initialised(nn.Sequential):
    """Draws values when layers are made, and others in the end, as language models do."""

    def __init__(self):
        tied = nn.Linear(4, 4, bias=False)
        super().__init__(
            nn.Embedding(4, 4),
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.LayerNorm(4)),
            nn.BatchNorm1d(4),
            nn.TransformerEncoderLayer(4, 2, 8),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            nn.GRU(4, 4),
            tied,
        )
        tied.weight = self[0].weight
        self.apply(self._draw)
        for name, parameter in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(parameter, std=0.02)

    @staticmethod
    def _draw(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight)


def plain():
    """Values that layers draw by themselves."""
    return nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Bilinear(4, 4, 4))


@pytest.mark.sizes(1, 4)
@pytest.mark.parametrize("make", [Initialised, plain])
def test_initial_values_and_random_state_are_those_of_the_unsplit_model(ranks, make):
    def body(comm):
        pipeline = make_pipeline(comm, make, loss_of)
        return dict(pipeline.state_dict()), torch.rand(1).item()

    torch.manual_seed(SEED)
    expected = make().state_dict()
    number = torch.rand(1).item()
    found: dict[str, torch.Tensor] = {}
    for state, drawn in ranks(body):
        assert drawn == number, "the random state goes on as after the unsplit model"
        found |= state
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# --- memory -----------------------------------------------------------------------------------------------------------
WIDTH, LAYERS = 16, 8
LAYER = WIDTH * WIDTH + WIDTH


class Counted(nn.Linear):
    """Notes, as each layer is made, how many elements the parameters have that are in memory."""

    def __init__(self, layers, counts):
        super().__init__(WIDTH, WIDTH)
        layers.append(self)
        counts.append(alive(layers))


def alive(layers):
    """The elements of the layers' parameters in memory, where several may lie in the same."""
    storages = [p.untyped_storage() for layer in layers for p in layer.parameters() if p.is_cpu]
    return sum({storage.data_ptr(): storage.nbytes() // 4 for storage in storages}.values())


@pytest.mark.parametrize("stages", [2, 4])
def test_no_rank_holds_the_whole_model_while_it_builds_its_part(stages):
    """Beside its layers there is one scratch tensor, as long as the longest of the others' parameters."""
    size, scratch = LAYERS // stages, WIDTH * WIDTH
    for first in range(0, LAYERS, size):
        layers, counts = [], []
        chain = build(
            lambda: nn.Sequential(*(Counted(layers, counts) for _ in range(LAYERS))), range(first, first + size)
        )
        assert len(chain) == size
        assert size * LAYER <= max(counts) <= size * LAYER + scratch
        assert alive(layers) <= size * LAYER + scratch
