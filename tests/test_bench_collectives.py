"""The benchmark of collective calls: every side is measured, other MPI libraries too, and rows are whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cases import each
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.tools import cli
from hpcdist.tools.bench import collectives


def environment(folder: Path, program: str) -> Path:
    """An environment whose mpiexec is a shell script."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "mpiexec").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "bin" / "mpiexec").chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


@pytest.mark.mpi(min_size=2)
@pytest.mark.time_limit(120)
def test_every_side_has_a_row_for_each_call_and_size(ranks, shared_tmp_path):
    def body(comm):
        seconds = {call: {"4096": 1e-9, "65536": 1e-9} for call in collectives.CALLS}
        if comm.rank == 0:
            environment(shared_tmp_path / "its", f"echo '{str(seconds).replace(chr(39), chr(34))}'")
        return collectives.measure(comm, sizes=(4096, 65536), rounds=2, other=shared_tmp_path / "its")

    results = ranks(body)
    assert results.count(results[0]) == len(results), "all ranks have the same rows"
    found = {(row["call"], row["bytes"], row["name"]) for row in results[0]}
    names = (collectives.OURS, "mpi", "gloo", collectives.COPY, "its")
    assert found == {(call, size, name) for call in collectives.CALLS for size in (4096, 65536) for name in names}
    for row in results[0]:
        assert row["median_s"] > 0 and row["ranks"] == len(results) and row["copies"] > 0
        assert row["speedup"] == pytest.approx(1e-9 / row["median_s"]), "beside the fastest of the others"


@pytest.mark.mpi(min_size=2)
@each("program", ["exit 3", "echo no", "none"])
def test_an_environment_that_does_not_work_is_refused_on_all_ranks(ranks, program, shared_tmp_path):
    def body(comm):
        place = shared_tmp_path / program / "its"
        if comm.rank == 0 and program != "none":
            environment(place, program)
        with pytest.raises(ConfigError, match=r"--with must be an environment whose bin has mpiexec.*; got .*its \("):
            collectives.measure(comm, ["broadcast"], sizes=(4096,), rounds=1, other=place)
        return True

    assert all(ranks(body))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--call", "gossip"], UnknownNameError, "--call must be one of .*; got 'gossip'"),
        (["--sizes", "6"], ConfigError, "sizes must be positive multiples of 4 bytes"),
        (["--sizes", "4"], ConfigError, "ranks of this measurement must be at least 2; got 1"),
    ],
)
def test_what_can_not_be_measured_is_refused(arguments, error, message):
    import typer

    command = typer.main.get_command(cli.app)
    with pytest.raises(error, match=message):
        command.main(["bench", "collectives", *arguments], standalone_mode=False)
