"""Random state of the virtual cluster: every virtual rank has a separate one, as a process would.

That is torch's default generator (CPU), numpy's legacy generator and Python's `random`. They are swapped whenever
another rank continues. `random.getstate()` takes 9 µs, `setstate` 5, and its tuple 25 kB, so the memory of `random`'s
object (it follows the object's header) is copied as bytes. In numpy each rank has a separate generator object, which is
swapped as a whole. numpy's state takes 35 µs: it is read only if the generator's memory, whose address numpy publishes,
has changed.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_get_bit_generator: Any = vars(np.random)["get_bit_generator"]  # numpy's types omit them
_set_bit_generator: Any = vars(np.random)["set_bit_generator"]
_NUMPY_BYTES = 2500  # a Mersenne twister in memory: 624 uint32 and a position
_python: Any = vars(random)["_inst"]  # whose methods are the functions of `random`
_PYTHON_ADDRESS = id(_python) + object.__basicsize__
_PYTHON_BYTES = _random.Random.__basicsize__ - object.__basicsize__


class RandomState:
    """The random state of one virtual rank, used while the rank runs; seeded by (seed, rank)."""

    def __init__(self, seed: int, rank: int):
        sequence = np.random.SeedSequence(seed, spawn_key=(rank, 0))
        torch_seed, python_seed = (int(word) for word in sequence.generate_state(2, np.uint64))
        self._torch = torch.Generator().manual_seed(torch_seed).get_state()
        python = random.Random(python_seed)
        self._python = ctypes.string_at(id(python) + object.__basicsize__, _PYTHON_BYTES)
        self._python_gauss: float | None = None  # a spare normal number
        self._own = np.random.MT19937(sequence)
        self._numpy: np.random.BitGenerator = self._own
        self._address = self._own.ctypes.state_address
        self._numpy_seen = b""  # numpy's memory when this was saved
        self._gauss: dict | None = None  # numpy's whole state, only while numpy holds a spare normal number

    def load(self) -> None:
        """Set the process's random state to this one."""
        torch.default_generator.set_state(self._torch)
        ctypes.memmove(_PYTHON_ADDRESS, self._python, _PYTHON_BYTES)
        _python.gauss_next = self._python_gauss
        _set_bit_generator(self._numpy)  # drops numpy's spare normal number
        if self._gauss is not None:
            np.random.set_state(self._gauss)

    def save(self) -> None:
        """Save the process's random state in this object: that of numpy only if it has changed."""
        self._torch = torch.default_generator.get_state()
        self._python, self._python_gauss = ctypes.string_at(_PYTHON_ADDRESS, _PYTHON_BYTES), _python.gauss_next
        self._numpy, numpy_memory = _get_bit_generator(), ctypes.string_at(self._address, _NUMPY_BYTES)
        # The generator object holds numpy's state, except for a spare normal number: numpy samples two at a time. There
        # may be one from before, one sampled since, or one of another generator that the rank has installed.
        if self._gauss is not None or self._numpy is not self._own or numpy_memory != self._numpy_seen:
            numpy_state = np.random.get_state(legacy=False)
            self._gauss = numpy_state if numpy_state["has_gauss"] else None
            self._numpy_seen = numpy_memory


@contextmanager
def callers_state_kept() -> Iterator[None]:
    """Context at whose end the process's random state is restored."""
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    bit_generator, numpy_state = _get_bit_generator(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        _set_bit_generator(bit_generator)
        np.random.set_state(numpy_state)
