"""Sums over the ranks whose pieces are encoded again."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hpcdist.collectives.base import bounds
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.compress.base import Recoded
from hpcdist.compress.coding.gather import TAG


def recode(comm: Communicator, compressor: Recoded, tensor: Tensor, out: Tensor, senders: int) -> None:
    """Collective. Sum the decoded messages of all ranks, and encode the sum again; the same bits on all ranks.

    Every rank owns one piece of the tensor. It sends each other rank its message for that rank's piece, adds the
    messages for its own piece, in a fixed order and the tensor's dtype, and sends all ranks the message for the sum.
    Bytes sent per rank: 2m(p − 1)/p for messages of m bytes in all; messages: 2(p − 1).

    Args:
        tensor: this rank's addend. Overwritten by the errors of its messages, that for the sum of its piece included.
        out: overwritten by the sum; another tensor than `tensor`.
        senders: number of ranks that contribute; the others' tensors are zeros, or their residuals.

    Reference: Jeremy Bernstein, Jiawei Zhao, Kamyar Azizzadenesheli, Anima Anandkumar, "signSGD with majority vote is
    communication efficient and fault tolerant", 2019; Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu,
    "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019.
    """
    cuts = bounds(tensor.numel(), comm.size)
    pieces = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    own = pieces[comm.rank]
    ahead = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # not all to the same one at once
    sends = [_send(comm, compressor.share(tensor[pieces[dest]], comm.size), dest) for dest in ahead]
    mine = tensor[own]
    total = compressor.begin(mine, comm.size)
    for source in reversed(ahead):
        compressor.add(_receive(comm, source), total)
    message = compressor.combine(total, senders)
    if total is not mine:
        mine.add_(total)
    sends += [_send(comm, message, dest) for dest in ahead]
    compressor.decode(message, out[own])
    for source in reversed(ahead):
        compressor.decode(_receive(comm, source), out[pieces[source]])
    for request, _ in sends:
        request.wait()


def _send(comm: Communicator, message: Tensor, dest: int) -> tuple[Request, Tensor]:
    """Start sending; return the transfer, and the message that must live until it is complete."""
    return comm.isend(message, dest, TAG), message


def _receive(comm: Communicator, source: int) -> Tensor:
    message = torch.empty(comm.probe(source, TAG).n_bytes, dtype=torch.uint8)
    comm.irecv(message, source, TAG).wait()
    return message
