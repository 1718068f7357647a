"""The account of a rank's transfers and of its waiting."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub


@dataclass
class Traffic:
    """One rank's transfers, in bytes, messages and seconds, and its seconds of waiting, since the communicator exists.

    `bytes_sent` and `messages_sent` count what this rank put on the network, one-sided puts and accumulates
    included; `bytes_fetched` and `messages_fetched` count what it took by one-sided gets; calls on a rank's own window
    move nothing and count nothing. `communicating_s` are the
    seconds inside calls that move data, `waiting_s` those spent until another rank acts (barrier, `Window.wait`,
    `probe`); the two don't overlap.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_fetched: int = 0
    messages_fetched: int = 0
    communicating_s: float = 0.0
    waiting_s: float = 0.0

    def sent(self, n_bytes: int, messages: int = 1) -> None:
        self.bytes_sent += n_bytes
        self.messages_sent += messages

    def fetched(self, n_bytes: int, messages: int = 1) -> None:
        self.bytes_fetched += n_bytes
        self.messages_fetched += messages

    def copy(self) -> Traffic:
        return Traffic(**vars(self))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*map(sub, vars(self).values(), vars(earlier).values()))
