"""Strategies' states as a checkpoint has them, in memory: saved by one world, and taken up by another."""

from __future__ import annotations

from functools import partial

from hpcdist.checkpoint.load import SavedRank
from hpcdist.checkpoint.tree import TreeDecoder, encode
from hpcdist.session.resharding import SavedState
from hpcdist.session.state import capture_strategy, restore_strategy


def _copy(kept, name):
    return kept[name].clone()


class HeldRank(SavedRank):
    """A rank's saved state, without files; ranks may send it to each other."""

    def __init__(self, state):
        self._tree, tensors, places = encode(state)
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        self._decoder = TreeDecoder(partial(_copy, kept), places, "memory")
        self._where = "memory"


def saved(strategy) -> HeldRank:
    """The state of this rank, but for its local optimiser's."""
    return HeldRank(capture_strategy(strategy))


def resharded(strategy, ranks) -> dict:
    """What `strategy`, of another world, finds in the states of these ranks."""
    return SavedState(ranks, 1, "folder").reshard_strategy(strategy)


def params(state) -> dict:
    return {name: chunk.tensor for name, chunk in state["params"].items()}


def take_up(strategy, ranks) -> dict:
    """Collective. Let a strategy of another world go on from the states of these ranks."""
    state = resharded(strategy, ranks)
    for slot, tensor in zip(strategy.model.slots, params(state).values()):
        slot.view(strategy.model.params).copy_(tensor)
    restore_strategy(strategy, state["strategy"])
    return state
