"""Training that goes on without a rank that dies, by Horovod's names: state that is kept, and restored on the others.

Ranks outlive another one under `mpirun --with-ft ulfm` alone. There are no new ranks: MPI's jobs do not grow.

Reference: the semantics are those of Elastic Horovod (Alexander Sergeev, Mike Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", 2018, and its documentation of `horovod.torch.elastic`).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from typing import Any

import torch

from hpcdist.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from hpcdist.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hpcdist.hvd.state import init, rank, shutdown, size


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of a `State` and more that trains: it begins again where ranks have died.

    Where a call fails for a death, the others go back to the last commit and get new ranks; where the function raises
    `HostsUpdatedInterrupt`, they keep what they have. Then all take rank 0's state, and call the function again.

    Raises:
        HorovodInternalError: a call has failed, though no rank has died: it would fail again.
    """

    @wraps(function)
    def elastic(state: State, *args: Any, **options: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return function(state, *args, **options)
            except HorovodInternalError as error:
                before = size()
                _reset()
                if size() == before:
                    raise error
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as change:
                skip_sync = change.skip_sync
                _reset()
            state.on_reset()

    return elastic


def _reset() -> None:
    shutdown()
    init()


class State:
    """What ranks must have alike; a script that has another kind of it defines `save`, `restore`, `sync` and `reset`.

    Args:
        bcast_object: makes rank 0's object everyone's.
        get_rank: returns this rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank):
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called whenever the ranks have changed: such as one that scales the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is, to be restored where a rank dies before the next commit."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: no hosts are added to a job of MPI's."""

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """Deal with other ranks than before."""


class ObjectState(State):
    """Attributes that are copied as Python's objects.

    Args:
        attributes: names and first values.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **attributes: Any,
    ):
        super().__init__(bcast_object, get_rank)
        self._saved = attributes
        self._take(attributes)

    def _take(self, values: dict[str, Any]) -> None:
        for name, value in copy.deepcopy(values).items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        self._take(self._saved)

    def sync(self) -> None:
        """Collective. Take rank 0's state."""
        self.save()
        if self._saved:
            self._saved = self._bcast_object(self._saved)
            self._take(self._saved)


class TorchState(ObjectState):
    """Models, optimisers and samplers, each by its own state, and other attributes.

    Args:
        model, optimizer: attributes of these names.
        attributes: others: any number of models, optimisers, `ElasticSampler`s and objects, and their names.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any):
        given = {"model": model, "optimizer": optimizer, **attributes}
        self._parts = {name: one for name, one in given.items() if isinstance(one, PARTS)}
        vars(self).update(self._parts)
        super().__init__(**{name: one for name, one in given.items() if name not in self._parts})
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_parts", ()):
            self._parts[name] = value
            self._kept[name] = copy.deepcopy(value.state_dict())
        super().__setattr__(name, value)

    def save(self) -> None:
        self._kept = {name: copy.deepcopy(one.state_dict()) for name, one in self._parts.items()}
        super().save()

    def restore(self) -> None:
        for name, one in self._parts.items():
            one.load_state_dict(copy.deepcopy(self._kept[name]))
        super().restore()

    def sync(self) -> None:
        """Collective. Take rank 0's state, and keep it."""
        for one in self._parts.values():
            if isinstance(one, torch.nn.Module):
                broadcast_parameters(one.state_dict(), root_rank=0)
            elif isinstance(one, torch.optim.Optimizer):
                broadcast_optimizer_state(one, root_rank=0)
            else:
                one.load_state_dict(broadcast_object(one.state_dict()))
        super().sync()

    def reset(self) -> None:
        for one in self._parts.values():
            if isinstance(one, ElasticSampler):
                one.reset()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals out a data set's samples, each to one rank; after a reset, those that are left to the ranks that are.

    Put it into the `TorchState`, call `record_batch` after each batch and `set_epoch` after each epoch. The last
    samples of an epoch are dealt twice where they are not as many for each rank.

    Args:
        dataset: of a length that stays.
        shuffle: deal samples in another order in each epoch.
        seed: of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample has been dealt."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has trained on a batch of so many samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are left to the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        dealt = left + (left * self.num_replicas)[: self.total_size - len(left)]
        return iter(dealt[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


PARTS = torch.nn.Module, torch.optim.Optimizer, ElasticSampler  # have a state_dict of their own
