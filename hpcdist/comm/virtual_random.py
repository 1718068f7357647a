"""Random state of the virtual cluster: every virtual rank owns what a process of its own would own.

That is torch's default generator (CPU), numpy's legacy generator and Python's `random`. They are swapped whenever
another rank goes on, which is the larger part of a switch's cost: asking numpy for its state takes 35 us, asking
`random` takes 8. So neither is asked before a look at its memory has shown that the rank has used it. The memory is
compared as it is, never interpreted and never written.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_NUMPY_BYTES = 2500  # a Mersenne twister in memory: 624 words and a position
_PYTHON = random.random.__self__  # the generator behind the module's functions
_PYTHON_ADDRESS = id(_PYTHON) + object.__basicsize__  # of its C part, behind the header
_PYTHON_BYTES = _random.Random.__basicsize__ - object.__basicsize__


class RandomState:
    """The process-wide random state of one virtual rank. At first it depends on (seed, rank) alone."""

    def __init__(self, seed: int, rank: int):
        sequence = np.random.SeedSequence(seed, spawn_key=(rank, 0))
        torch_seed, python_seed = (int(word) for word in sequence.generate_state(2, np.uint64))
        self._torch = torch.Generator().manual_seed(torch_seed).get_state()
        self._python = random.Random(python_seed).getstate()
        self._own = self._numpy = np.random.MT19937(sequence)
        self._address = self._own.ctypes.state_address
        self._loaded = b"", b""
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
        self._numpy = np.random.get_bit_generator()
        python_now, numpy_now = self._peek()
        python_loaded, numpy_loaded = self._loaded
        if python_now != python_loaded or _PYTHON.gauss_next is not self._python[2]:
            self._python = random.getstate()
        # numpy's generator has been taken along as it is, but numpy may keep a normal number beside it: one that it
        # had kept before, or of a draw since, or of a generator that the rank has put in the place of ours.
        if self._gauss is not None or self._numpy is not self._own or numpy_now != numpy_loaded:
            state = np.random.get_state(legacy=False)
            self._gauss = state if state["has_gauss"] else None

    def _peek(self) -> tuple[bytes, bytes]:
        return ctypes.string_at(_PYTHON_ADDRESS, _PYTHON_BYTES), ctypes.string_at(self._address, _NUMPY_BYTES)


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
