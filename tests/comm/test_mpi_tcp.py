"""Windows internode nodes over TCP, on real ranks: many askers, long transfers, strangers, ends."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.comm import network
from hpcdist.errors import CommunicationError, DeadlineError, UnknownNameError

REAL = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.sizes(2)
needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")


@pytest.fixture
def apart(ranks):
    """Runs a body on ranks that count as being on nodes of their own and reach each other over TCP."""

    def run(body, internode="tcp"):
        def there(comm):
            place = comm.apart(internode)
            result = body(place)
            place.close()
            return result

        return ranks(there)

    return run


def sockets() -> int:
    """How many sockets this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)


@REAL
@pytest.mark.sizes(3)
def test_a_burst_from_several_askers_at_once(apart):
    """Threads of all ranks use all ranks' windows at the same time; nothing is lost, and answers are not mixed up."""

    def body(comm):
        n_threads, times = 3, 20
        words, sums = comm.window(1, torch.int64), comm.window(1000)
        slots = comm.window(comm.size * n_threads * 500)
        wrong = []

        def ask(thread):
            mine = 500 * (comm.rank * n_threads + thread)
            for i in range(times):
                for peer in range(comm.size):
                    words.fetch_add(1, peer)
                    sums.accumulate(torch.ones(1000), peer)
                    values, out = torch.full((500,), float(mine + i)), torch.empty(500)
                    slots.put(values, peer, mine)
                    slots.get(out, peer, mine)
                    if not torch.equal(values, out):
                        wrong.append((thread, i, peer))

        threads = [threading.Thread(target=ask, args=[thread]) for thread in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comm.barrier()
        total = n_threads * times * comm.size
        assert wrong == [] and words.local[0] == total and (sums.local == total).all()
        for window in (words, sums, slots):
            window.close()

    apart(body)


@REAL
def test_silent_strangers_give_way_and_too_many_files_are_waited_for(apart, monkeypatch):
    """A thousand would take a minute: a moment is shorter here."""
    monkeypatch.setattr(network, "PAUSE_S", 0.02)
    strangers = (
        "import socket, sys; held = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(300)]; "
        "print('there', flush=True); sys.stdin.read()"
    )

    def body(comm):
        window = comm.window(4)
        window.local.fill_(7)
        server = comm.memory.server()
        comm.barrier()
        if comm.rank == 0:
            address = list(map(str, server._listener.getsockname()[:2]))
            assert address[0] == network.LOOPBACK, "all ranks are here"
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", strangers, *address]
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as others:
                free = os.dup(0)
                os.close(free)
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))  # none is left
                    assert others.stdout.readline() == "there\n"
                    assert len(server._unproven) <= 1  # the kernel takes a number before it waits
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
                comm.barrier()
                comm.barrier()  # rank 1 has been served
                assert len(server._serving) <= network.UNPROVEN + comm.size and server._thread.is_alive()
                others.communicate("")
            assert network.connect(address[0], int(address[1]), bytes(network.TOKEN_BYTES)) is None, "not of this job"
        else:
            comm.barrier()
            out = torch.empty(4)
            window.get(out, 0)
            assert (out == 7).all()
            comm.barrier()
        window.close()

    apart(body)


@REAL
def test_a_broken_connection_names_the_rank_and_the_next_call_makes_another(apart):
    def body(comm):
        window, out = comm.window(2), torch.empty(2)
        if comm.rank == 1:
            window.get(out, 0)
        comm.barrier()
        if comm.rank == 0:
            for thread, connection in list(comm.memory.server()._serving.items()):
                network.close(connection)
                thread.join()
            window.local.fill_(3)
        comm.barrier()
        if comm.rank == 1:
            message = r"rank 1 can't reach rank 0 in a window get on .*Either rank 0 has ended: see its last"
            with pytest.raises(CommunicationError, match=message):
                window.get(out, 0)
            window.get(out, 0)
            assert (out == 3).all()
        window.close()

    apart(body)


@REAL
def test_another_jobs_listener_is_not_taken_for_a_rank_and_where_nobody_listens_it_says_so(apart):
    """As where each host has the same address, of a bridge between its containers."""

    def body(comm):
        window, server = comm.window(1), comm.memory.server()
        peer = server._peers[0]
        token, peer.token = peer.token, bytes(network.TOKEN_BYTES)
        if comm.rank == 1:
            with pytest.raises(CommunicationError, match=r"reach rank 0 .*no rank of this job replies at 127.0.0.1"):
                window.get(torch.empty(1), 0)
            peer.token = token
            window.get(torch.empty(1), 0)
            peer.drop()
        comm.barrier()
        if comm.rank == 0:
            server.refuse()
        comm.barrier()
        if comm.rank == 1:
            message = r"rank 1 can't reach rank 0 .*\(.*refused.*internode='tcp:eth0'"
            with pytest.raises(CommunicationError, match=message):
                window.get(torch.empty(1), 0)
        window.close()

    apart(body)


@REAL
def test_an_owner_that_does_not_answer_in_time_is_named(apart):
    """Its memory is being added to all the time, so the threads of the others must wait for their turn."""

    def body(comm):
        window = comm.window(1, torch.int64)
        if comm.rank == 1:
            window.fetch_add(1, 0)  # connected
        comm.barrier()
        held = comm.memory.server()._adding
        if comm.rank == 0:
            held.acquire()
        comm.barrier()
        if comm.rank == 1:
            comm.failures.deadline_s = 0.3
            message = r"rank 1: the reply of rank 0 to a window fetch_add on .* did not happen within 0.3 s"
            with pytest.raises(DeadlineError, match=message):
                window.fetch_add(1, 0)
            comm.failures.deadline_s = 30
        comm.barrier()
        if comm.rank == 0:
            held.release()
        comm.barrier()
        if comm.rank == 1:
            assert window.fetch_add(0, 0) in (1, 2), "a late answer is not taken for that of another call"
        window.close()

    apart(body)


@REAL
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc: can't count sockets")
def test_threads_and_sockets_end_with_the_communicator_used_or_idle(ranks):
    def listeners():
        return [thread.name for thread in threading.enumerate()].count("hpcdist-window-listener")

    def body(comm):
        others = listeners()
        for round_ in range(4):
            if round_ == 1:  # what MPI opens at its first use stays open
                before = threading.active_count(), sockets()
            used, idle, early = comm.apart("tcp"), comm.apart("tcp"), comm.apart("tcp")
            windows = [place.window(3) for place in (used, idle)]
            for peer in range(comm.size):
                windows[0].get(torch.empty(3), peer)
            assert listeners() == others + 2, "a communicator without windows has no threads"
            used.barrier()
            for window in windows:
                window.close()
            for place in (used, idle, early):
                place.close()
        assert (threading.active_count(), sockets()) == before

    ranks(body)


@REAL
def test_an_interface_may_be_chosen(apart):
    known = network.addresses()
    if not known:
        pytest.skip("this machine has no network but loopback")

    def body(comm):
        assert comm.memory.internode in ("tcp", "auto")
        window = comm.window(2)
        window.local.fill_(comm.rank)
        comm.barrier()
        out = torch.empty(2)
        for peer in range(comm.size):
            window.get(out, peer)
            assert (out == peer).all()
        server = comm.memory.server()
        assert server._listener.getsockname()[0] == str(known[0].ip.ip)
        remote = server._peers[(comm.rank + 1) % comm.size].connection.getpeername()[0]
        assert remote == str(known[0].ip.ip)
        part = comm.split(0)
        assert part.memory.internode == comm.memory.internode and part.memory.requested == comm.memory.requested
        part.close()
        window.close()

    apart(body, f"tcp:{known[0].interface}")

    def refused(comm):
        with pytest.raises(UnknownNameError, match="interface or network of this host must be one of .* got 'ib77'"):
            comm.memory.server()

    apart(refused, "tcp:ib77")


STOPPED = """
import os, signal, time
import torch
import hpcdist as hd
comm = hd.init()
apart = comm.apart("tcp")
window = apart.window(4)
comm.barrier()
apart.failures.deadline_s = 1  # from here on: a busy machine may take longer to start
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
window.get(torch.zeros(4), 1)  # the call
"""


@needs_mpirun
def test_an_owner_that_is_stopped_ends_the_job_at_the_deadline(tmp_path):
    """It has not been connected to; to one that has been see above."""
    job = run(tmp_path, STOPPED, 2)
    assert job.returncode != 0
    own = r"DeadlineError: rank 0: the reply of rank 1 to a window get on world/apart did not happen within 1 s"
    watchdogs = r"rank 0 waited [\d.]+ s for rank 1 in window get on world/apart"  # who looks first, says it
    assert re.search(f"{own}|{watchdogs}", job.stderr), job.stderr
    assert "# the call" in job.stderr
