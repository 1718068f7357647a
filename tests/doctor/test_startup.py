"""The start-up check, by a script, TCP and MPI: who is there, which pairs reach each other, how findings say it."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcdist.tools.doctor import startup
from hpcdist.tools.doctor.base import ERROR, WARNING, Nodes
from hpcdist.tools.doctor.startup import Result, check

ROOT = Path(__file__).parents[2]
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
CHECK = """
import json, os, sys
from hpcdist.tools.doctor import startup
startup.ANSWER_S, startup.REACH_S = 4.0, 1.5
print(json.dumps(startup.check_nodes(os.environ, sys.argv[1:])[1:]))
"""


def test_what_does_not_answer_is_named_by_node_where_nodes_are_known_and_else_by_rank():
    hosts = {0: "n1.cluster", 1: "n1.cluster", 4: "n3.cluster"}
    found = startup.absent_ranks(hosts, [2, 3, 5], ["n1", "n2", "n3", "n4"], 10)
    assert [(f.status, f.nodes) for f in found] == [(ERROR, ("n2",)), (ERROR, ("n4",))]
    text = "every rank must answer; got nothing from ranks 2-3, 5 within 10 s, nor from any rank on n2. It has ended"
    assert found[0].text.startswith(text)
    for hosts, expected in [({0: "n1"}, []), ({0: "n1"}, ["n1"]), ({3: "n1"}, ["n1", "n2"])]:
        (found,) = startup.absent_ranks(hosts, [2], expected, 10)
        assert found.nodes == ()
        assert found.text.startswith("every rank must answer; got nothing from rank 2 within 10 s. It has ended")


def test_pairs_of_nodes_that_pass_nothing_are_told_by_node():
    nodes = Nodes(("n1", "n2", "n3", "n4", "n5"), (0, 1, 2, 3, 4))
    (link,) = startup.unreachable_pairs([(1, 2)], nodes, "it did not come")
    assert (link.status, link.nodes, link.weight) == (ERROR, ("n2", "n3"), 1)
    assert link.text.startswith("the link n2-n3 passes nothing: it did not come, though all reach n1. Exclude one of")
    node, rest = startup.unreachable_pairs([(1, 2), (2, 3), (2, 4), (1, 4)], nodes, "it did not come")
    assert (node.nodes, node.weight, rest.nodes) == (("n3",), 3, ("n2", "n5"))
    assert node.text.startswith("the links from n3 to n2, n4, n5 pass nothing: it did not come, though all reach n1.")


def test_all_pairs_are_tried_or_of_many_nodes_some_with_each():
    assert startup.pairs_to_try(1) == [] and startup.pairs_to_try(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    count = startup.ALL_PAIRS + 3
    pairs = startup.pairs_to_try(count)
    assert {(0, 1), (0, 2), (0, 4), (0, 64), (0, 128), (0, count - 1)} <= set(pairs) and (0, 5) not in pairs
    assert all(0 <= a < b < count for a, b in pairs) and len(pairs) <= count * 8


def test_a_node_that_does_not_come_is_named():
    (found,) = startup.absent_nodes(["n3"], "n1", 8)
    assert (found.status, found.nodes) == (WARNING, ("n3",))
    assert found.text == "n3 must connect to n1 by TCP; it did not within 8 s: it hangs, or can't reach it"


class Scripted:
    """Member `rank` of three; `replies` are what it hears, `failed` the pairs that it finds to pass nothing."""

    answer_s, reach_s, size = 8.0, 2.0, 3

    def __init__(self, rank: int, replies: list[dict[int, str]], failed: list[tuple[int, int]]):
        self.rank, self.replies, self.failed, self.calls = rank, replies, failed, []

    def exchange(self, text, limit_s, members):
        self.calls.append((text, limit_s, [*members]))
        return self.replies.pop(0)

    def unreachable(self, pairs):
        return [pair for pair in pairs if pair in self.failed]


def test_what_members_find_out_is_put_together():
    came = {0: "a", 2: "c", 1: "b"}
    member = Scripted(1, [came, {0: "[]", 1: "[[1, 2]]", 2: "[[1, 2], [0, 2]]"}], [(1, 2), (0, 1)])
    found = check(member, "b", lambda came: [(1, 2), (0, 2)])
    assert found == Result(came, (), ((0, 2), (1, 2)))
    assert member.calls == [("b", 8.0, [0, 1, 2]), ("[[1, 2]]", 4.0, [0, 2, 1])]


def test_members_that_do_not_come_are_absent_and_the_others_are_tried():
    member = Scripted(0, [{0: "a", 2: "c"}, {0: "[[0, 2]]"}], [(0, 2)])
    assert check(member, "a", lambda came: [tuple(came)]) == Result({0: "a", 2: "c"}, (1,), ((0, 2),))
    assert check(Scripted(0, [{0: "a"}], []), "a", lambda came: []) == Result({0: "a"}, (1, 2))


def test_without_a_reply_the_first_member_is_absent():
    assert check(Scripted(2, [{2: "c"}], []), "c", lambda came: [(1, 2)]) == Result({2: "c"}, absent=(0,))


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(4)  # all of the job
def test_real_ranks_reach_each_other(ranks):
    def body(comm):
        from hpcdist.comm.mpi.first_messages import FirstMessages

        transport = FirstMessages()
        transport.answer_s, transport.reach_s = 20, 10
        return check(transport, f"I am {comm.rank}", lambda came: itertools.combinations(came, 2))

    said = {rank: f"I am {rank}" for rank in range(ranks.size)}
    assert ranks(body) == [Result(said)] * ranks.size


# --- by TCP, on hosts of their own ------------------------------------------------------------------------------------
def checked(made, absent: str = "", **environ: str) -> list:
    """What each host found but for one that does not come, with limits that are shorter than the doctor's."""
    running = []
    for node, name in enumerate(made.names):
        if name != absent:
            own = {**os.environ, **SRUN, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)}
            command = [*made.inside(name), sys.executable, "-c", CHECK, *made.names]
            running.append(subprocess.Popen(command, env=own | environ, stdout=subprocess.PIPE, text=True))
    return [json.loads(process.communicate(timeout=60)[0]) for process in running]


def cut(made, one: str, other: str, *what: str) -> None:
    address = next(line.split()[0] for line in (made.folder / "hosts").read_text().splitlines() if other in line)
    words = [word.format(address) for word in what]
    subprocess.run([*made.inside(one), "ip", *words], check=True)


def test_hosts_find_who_does_not_come_and_which_pair_passes_nothing(make_hosts):
    """Also where one way only is broken; where none can reach the first one they have another network."""
    made, well = make_hosts(4), [[], []]
    assert checked(made, OMPI_MCA_btl_tcp_if_include="eth0") == [well] * 4
    assert checked(made, absent="n2") == [[[1], []], well, well]
    lost = ("neigh", "replace", "{}", "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
    refused = ("route", "add", "unreachable", "{}/32")
    cut(made, "n4", "n3", *lost)
    assert checked(made) == [[[], [[2, 3]]], well, well, well]
    cut(made, "n4", "n3", "neigh", "del", "{}", "dev", "eth0")
    cut(made, "n4", "n3", *refused)
    assert checked(made) == [[[], [[2, 3]]], well, well, well]
    for name in ("n2", "n3", "n4"):
        cut(made, name, "n1", *refused)
    assert checked(made) == [well] * 4


# --- TCP in one process -----------------------------------------------------------------------------------------------
def test_only_the_first_process_of_a_node_takes_part_and_only_with_srun():
    assert startup.takes_part({**SRUN, "SLURM_PROCID": "2"})
    assert not startup.takes_part({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "1"})
    assert not startup.takes_part({}) and not startup.takes_part({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"})
    mpirun = {f"OMPI_COMM_WORLD_{what}": value for what, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"))}
    assert not startup.takes_part({**SRUN, **mpirun})


def test_strangers_are_not_counted(monkeypatch):
    monkeypatch.setattr(startup, "ANSWER_S", 0.5)
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        found: list[Result] = []
        first = startup.Tcp(listener, "here", "1.0", rank=0, size=2)
        leader = threading.Thread(target=lambda: found.append(check(first, "", lambda came: [])))
        leader.start()
        for line in (b"GET / HTTP/1.1\r\n", b'["2.0", 1, ""]\n', b"[]\n", b"7\n", b"[" * (startup.LINE + 1)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(line)
        leader.join(20)
    assert found == [Result({0: ""}, absent=(1,))]


def test_a_port_that_is_taken_is_left_alone():
    port = startup.FIRST_PORT + (4711 + 7 * 2) % startup.PORTS
    with socket.create_server(("", port)):
        assert startup.check_nodes({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, ["n1", "n2"]) == Result({})
