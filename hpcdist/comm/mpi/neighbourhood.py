"""Neighbour exchange of real ranks: MPI's neighbourhood collectives on a distributed-graph communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.messages import check_graph
from hpcdist.comm.mpi.buffers import message
from hpcdist.comm.mpi.calls import EVERYONE, Calls
from hpcdist.comm.mpi.request import MpiRequest
from hpcdist.comm.neighbourhood import Neighbourhood
from hpcdist.comm.transfer import Request

EXCHANGE = "neighbour exchange"


class MpiNeighbourhood(Neighbourhood):
    """Collective. Exchange tensors by MPI's neighbourhood collectives; see Communicator.neighbourhood.

    MPI knows who talks to whom before the first message, and ranks keep their places (`reorder` is off).

    Reference: Torsten Hoefler, Rolf Rabenseifner, Hubert Ritzdorf, Bronis R. de Supinski, Rajeev Thakur, Jesper Larsson
    Träff, "The scalable process topology interface of MPI 2.2", 2011.
    """

    def __init__(self, comm, sources: Sequence[int], destinations: Sequence[int]):
        check_graph(comm, sources, destinations)
        self.sources, self.destinations = tuple(sources), tuple(destinations)
        self._comm = comm
        places = [[comm.failures.living.index(rank) for rank in ranks] for ranks in (sources, destinations)]
        self._graph = comm.members.alive.Create_dist_graph_adjacent(*places, reorder=False)

    def _start(self, send: Tensor, received: Tensor) -> Request:
        comm = self._comm
        sent = send if comm.staging.direct(send) else send.cpu()
        direct = comm.staging.direct(received)
        host = received if direct else torch.empty_like(received, device="cpu", pin_memory=True)
        comm.calls.count += 1
        memory, _, carrier = message(host)
        into = [memory, send.numel() if self.sources else 0, carrier]  # MPI counts what comes from one source
        request = comm.calls.attempt(EXCHANGE, EVERYONE, self._graph.Ineighbor_allgather, message(sent), into)
        comm.traffic.sent(len(self.destinations) * send.nbytes, len(self.destinations))
        return _Exchange(comm.calls, request, sent, host, None if direct else received)

    def close(self) -> None:
        if (
            not self._comm.failures.tolerant
        ):  # freeing is collective, and any rank may be dead by now; the job's end does it
            self._graph.Free()


class _Exchange(MpiRequest):
    """A request that also keeps the tensor sent alive."""

    def __init__(self, calls: Calls, request: MPI.Request, sent: Tensor, host: Tensor, device: Tensor | None):
        super().__init__(calls, request, EXCHANGE, EVERYONE, host, device)
        self._sent = sent
