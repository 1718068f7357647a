"""What the job on slow networks foretells: networks measured as they are, steps as long as they must be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.config import load as load_settings
from hpcdist.records import Evaluation, RecordWriter, StepRecord, load_summary, record_path
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.tools.simulate.making import Simulation
from study.pretended import ended

STUDY = "network"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_network_is_measured_as_it_is(training, size):
    network = Network(latency_s=5e-3, bandwidth_bytes_s=12e6)
    for found in run_virtual(lambda comm: training.measure_network(comm, 10), size, network=network):
        assert found["latency_s"] == pytest.approx(5e-3, rel=1e-3)
        assert found["bandwidth_bytes_s"] == pytest.approx(12e6, rel=0.03)


def test_a_step_takes_as_long_as_computing_and_a_ring(study, tmp_path):
    computing_s = [[0.1, 0.2, 0.1, 0.4], [0.3, 0.2, 0.1, 0.1]]  # of each rank; the slower one counts
    for rank, seconds in enumerate(computing_s):
        with RecordWriter(record_path(tmp_path / "real", rank)) as writer:
            for step, computing in enumerate(seconds, 1):
                writer.write(StepRecord(step, computing_s=computing))
    real = ended([Evaluation(4, 0, 64, 1.0, {"accuracy": 0.9})], latency_s=1e-3, bandwidth_bytes_s=1e6)
    scale = study.Scale(hidden=200, batch=8)
    cell = scale.predicted(study.Cable(), study.DENSE, replace(real, folder=tmp_path / "real"))
    run = PlannedRun(cell.name, "strategy", 2, 0, (*cell.settings, "seed=0"), "run", cell.cluster, cell.loop)
    (tmp_path / "run").mkdir()
    Simulation(str(study.JOB), ClusterConfig(compute="0s"), 1, {}).train(run, tmp_path / "run")
    found = load_summary(tmp_path / "run")
    n_bytes = 4 * (65 * 200 + 201 * 200 + 201 * 10)
    assert load_settings({}, None, cell.settings)["steps"] == 4 and found.samples == 4 * 2 * 8
    assert found.bytes_per_step == pytest.approx(n_bytes, rel=0.01), "2n(p − 1)/p"
    expected_s = (0.3 + 0.2 + 0.1 + 0.4) / 4 + 2 * (1e-3 + n_bytes / 2 / 1e6)
    assert found.wall_s / 4 == pytest.approx(expected_s, rel=0.05)
