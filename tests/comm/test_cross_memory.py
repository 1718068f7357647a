"""Reading and writing another process's memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from hpcdist.comm.mpi import attached
from hpcdist.comm.mpi.attached import PeerMemory
from hpcdist.errors import CommunicationError

# As `allow_peers` does; to import the library would take longer than the test.
CHILD = """
import array, ctypes, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
data = array.array("q", range(100_000))
print(data.buffer_info()[0], flush=True)
sys.stdin.readline()
print(sum(data), data[1000], flush=True)
"""


@pytest.fixture
def child():
    """A process with numbers in its memory, and their address."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True) as process:
        address = int(process.stdout.readline())
        try:
            PeerMemory(process.pid).read(np.empty(1, np.int64).ctypes.data, address, 8)
        except CommunicationError as error:
            process.kill()
            pytest.skip(f"the kernel allows it not: {error}")
        yield process, address
        process.stdin.close()


def test_another_process_is_read_and_written_at_any_offset(child):
    process, address = child
    peer, seen = PeerMemory(process.pid), np.zeros(100_000, np.int64)
    peer.read(seen.ctypes.data, address, seen.nbytes)
    assert (seen == np.arange(100_000)).all()
    peer.read(seen.ctypes.data + 16, address + 8 * 500, 80)
    assert seen[:13].tolist() == [0, 1, *range(500, 510), 12]
    new = np.array([-7], np.int64)
    peer.write(new.ctypes.data, address + 8 * 1000, 8)
    peer.read(seen.ctypes.data, address, 0)  # nothing
    for call, verb in ((peer.read, "reading"), (peer.write, "writing")):  # where there is no memory
        with pytest.raises(CommunicationError, match=rf"{verb} 32 bytes of process {process.pid} failed: Bad address"):
            call(np.zeros(4).ctypes.data, 64, 32)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline().split() == [str(sum(range(100_000)) - 1000 - 7), "-7"]


def test_a_process_that_is_gone_is_an_error():
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(CommunicationError, match=r"reading 8 bytes of process \d+ failed: No such process"):
        PeerMemory(gone.pid).read(np.zeros(1).ctypes.data, 64, 8)


def test_a_system_without_the_call_is_an_error(monkeypatch):
    monkeypatch.setattr(attached, "_read", None)
    with pytest.raises(CommunicationError, match="cross-memory attach must be offered by the C library"):
        PeerMemory(os.getpid()).read(0, 0, 1)
