"""Random state of the virtual cluster: every virtual rank owns what a process of its own would own.

That is torch's default generator (CPU), numpy's legacy generator and Python's `random`. They are swapped whenever
another rank goes on, which is the larger part of a switch's cost, hence the care taken here.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_PEEK_BYTES = 2500  # of a Mersenne twister's state in memory: 624 words and a position


class RandomState:
    """The process-wide random state of one virtual rank. At first it depends on (seed, rank) alone."""

    def __init__(self, seed: int, rank: int):
        sequence = np.random.SeedSequence(seed, spawn_key=(rank, 0))
        torch_seed, python_seed = (int(word) for word in sequence.generate_state(2, np.uint64))
        self._torch = torch.Generator().manual_seed(torch_seed).get_state()
        self._python = random.Random(python_seed).getstate()
        self._own = self._numpy = np.random.MT19937(sequence)
        self._address = self._own.ctypes.state_address
        self._loaded = b""
        self._gauss: dict | None = None  # numpy's whole state where it keeps a second normal number for later

    def load(self) -> None:
        """Makes this the state of the process."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        np.random.set_bit_generator(self._numpy)  # forgets a normal number kept for later
        if self._gauss is not None:
            np.random.set_state(self._gauss)
        self._loaded = self._peek()

    def save(self) -> None:
        """Takes over the state of the process."""
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy = np.random.get_bit_generator()
        # Asking numpy for its state takes 35 us, so it is asked only if it may keep a normal number: it had kept one
        # before, or it has been used since, or the rank has put another generator in the place of ours.
        if self._gauss is not None or self._numpy is not self._own or self._peek() != self._loaded:
            state = np.random.get_state(legacy=False)
            self._gauss = state if state["has_gauss"] else None

    def _peek(self) -> bytes:
        return ctypes.string_at(self._address, _PEEK_BYTES)


@contextmanager
def callers_state_kept() -> Iterator[None]:
    """Puts the process-wide random state back at the end."""
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    bit_generator, numpy_state = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_bit_generator(bit_generator)
        np.random.set_state(numpy_state)
