"""Connect children and parents by a channel of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.server.client import Client
from hpcdist.strategies.server.inbox import Inbox
from hpcdist.strategies.server.slots import Slots


class RequestChannel:
    """Collective. Open slots for all requests and replies; see `Slots` for the arguments.

    Attributes:
        client: pushes this rank's requests to its parents.
        inbox: takes the requests of its children.
        up, down: the tensors of requests and of replies.
    """

    def __init__(self, comm: Communicator, *laid_out: Any, **options: Any):
        self._slots = Slots(comm, *laid_out, **options)
        self.client = Client(self._slots)
        self.inbox = Inbox(self._slots, self.client)
        self.up, self.down = self._slots.up, self._slots.down
        by_name = {"letters": self.up, "answers": self.down}  # as checkpoints call them
        self._compressed = {name: channel for name, channel in by_name.items() if channel.words}

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        """Return what compression remembers; empty where nothing is compressed."""
        return {name: channel.state() for name, channel in self._compressed.items()}

    def load_state(self, state: dict, values: Sequence[Tensor]) -> None:
        """Collective. Take up what `state()` or `reshard()` gave; a channel that it lacks begins with `values`."""
        for name, channel in self._compressed.items():
            channel.load_state(state.get(name, {}), values)

    def reshard(self, states: Sequence[dict], workers: int) -> dict:
        """Return a state for another number of ranks than that of `states`, of which so many were workers."""
        channels = self._compressed.items()
        return {n: channel.reshard([s[n] for s in states if n in s], workers) for n, channel in channels}

    def close(self) -> None:
        """Collective. Close the windows."""
        self._slots.close()
