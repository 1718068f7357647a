"""Memory of an optimiser, as a plan counts it."""

import pytest

from hpcdist.config import JobConfig
from hpcdist.train.planning import copies


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [
        ({"name": "SGD", "lr": 0.1}, 2), ({"name": "SGD", "lr": 0.1, "momentum": 0.9}, 3), ({"name": "AdamW"}, 4),
        ({"name": "SparseAdam"}, 2), ({"name": "LBFGS"}, 4),
    ],
)  # fmt: skip
def test_weights_gradients_and_state(optimizer, number):
    assert copies(JobConfig(optimizer=optimizer)) == number
