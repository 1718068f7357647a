"""All-gather of messages of any lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator

TAG = 1 << 14  # apart from those of strategies and of collectives


def join(messages: Sequence[Tensor]) -> Tensor:
    """Join several messages to one: the lengths of all but the last, 4 bytes each, and then the messages."""
    lengths = torch.tensor([len(message) for message in messages[:-1]], dtype=torch.int32).view(torch.uint8)
    return torch.cat([lengths, *messages])


def cut(joined: Tensor, count: int) -> list[Tensor]:
    """Cut a joined message into its `count` messages."""
    head = 4 * (count - 1)
    lengths = joined[:head].clone().view(torch.int32).tolist()
    return list(joined[head:].split([*lengths, len(joined) - head - sum(lengths)]))


def gather(comm: Communicator, messages: Sequence[Tensor], count: int, senders: Sequence[int]) -> list[list[Tensor]]:
    """Collective. Gather the `count` messages of each of the `senders`, in this order, on every rank.

    Bytes sent by a sender: p − 1 times its messages, and 4 for each of them but the last. Receivers probe for the
    lengths, so that nothing but the messages is sent.
    """
    joined = {}
    sends = []
    if comm.rank in senders:
        joined[comm.rank] = join(messages)
        others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]  # not all to the same one at once
        sends = [comm.isend(joined[comm.rank], dest, TAG) for dest in others]
    for step in range(1, comm.size):
        source = (comm.rank - step) % comm.size
        if source in senders:
            joined[source] = torch.empty(comm.probe(source, TAG).n_bytes, dtype=torch.uint8)
            comm.irecv(joined[source], source, TAG).wait()
    for send in sends:
        send.wait()
    return [cut(joined[source], count) for source in senders]
