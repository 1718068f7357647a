"""What the job on slow networks foretells: networks measured as they are, steps as long as they must be."""

from __future__ import annotations

import pytest

from hpcdist.comm.virtual import Network, run_virtual


@pytest.fixture
def training(kit):
    """The study's module of that name."""
    from network_study import training

    return training


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_network_is_measured_as_it_is(training, size):
    network = Network(latency_s=5e-3, bandwidth_bytes_s=12e6)
    for found in run_virtual(lambda comm: training.measure_network(comm, 10), size, network=network):
        assert found["latency_s"] == pytest.approx(5e-3, rel=1e-3)
        assert found["bandwidth_bytes_s"] == pytest.approx(12e6, rel=0.03)


def test_a_step_takes_as_long_as_computing_and_a_ring(training, tmp_path):
    from network_study.setups import DENSE, SETUPS

    training.write_data(tmp_path / "data.pt")
    settings = {"options": SETUPS[DENSE], "hosts": 2, "hidden": 200, "batch": 8, "rate": 0.1, "momentum": 0.9}
    settings |= {"every": 2, "seed": 0, "steps": 4, "latency_s": 1e-3, "bandwidth_bytes_s": 1e6}
    settings["computing_s"] = [[0.1, 0.2, 0.1, 0.4], [0.3, 0.2, 0.1, 0.1]]  # of each rank; the slower one counts
    found = training.predict(tmp_path / "data.pt", settings)
    n_bytes = 4 * (65 * 200 + 201 * 200 + 201 * 10)
    assert found["steps"] == 4
    assert found["bytes_per_step"] == pytest.approx(n_bytes, rel=0.01), "2n(p − 1)/p"
    expected_s = (0.3 + 0.2 + 0.1 + 0.4) / 4 + 2 * (1e-3 + n_bytes / 2 / 1e6)
    assert found["step_s"] == pytest.approx(expected_s, rel=0.05)
