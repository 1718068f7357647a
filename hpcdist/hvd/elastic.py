"""Training that continues without a failed rank, by Horovod's names: state is committed, and restored on the others.

Ranks survive another one's failure only under `mpirun --with-ft ulfm`. No ranks are added: MPI jobs do not grow.

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
    """Decorate a training function whose first argument is a `State`: it is called again if ranks have failed.

    If a call fails because of a failed rank, the others restore the last commit and form a new group of ranks; if the
    function raises `HostsUpdatedInterrupt`, they keep their state. Then all load rank 0's state and call it again.

    Raises:
        HorovodInternalError: a call has failed although no rank has: it would fail again.
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
                previous_size = size()
                _reset()
                if size() == previous_size:  # no rank has failed
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
    """State that must be equal on all ranks; subclasses define `save`, `restore`, `sync` and `reset`.

    `bcast_object` broadcasts rank 0's object; `get_rank` returns this rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank):
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to call whenever the ranks have changed, such as one that scales the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, to be restored if a rank fails before the next commit."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: no hosts are added to an MPI job."""

    def save(self) -> None:
        raise NotImplementedError

    restore = sync = save

    def reset(self) -> None:
        """Adapt to a changed group of ranks."""


class ObjectState(State):
    """Attributes that are copied as Python objects; the keyword arguments are their names and initial values."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **attributes: Any,
    ):
        super().__init__(bcast_object, get_rank)
        self._saved = attributes
        self._assign(attributes)

    def _assign(self, values: dict[str, Any]) -> None:
        for name, value in copy.deepcopy(values).items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        self._assign(self._saved)

    def sync(self) -> None:
        """Collective. Load rank 0's state."""
        self.save()
        if self._saved:
            self._saved = self._bcast_object(self._saved)
            self._assign(self._saved)


class TorchState(ObjectState):
    """Models, optimisers and samplers, by their `state_dict`s (saved ones in `_kept`), and other attributes.

    Args:
        model, optimizer: attributes with these names.
        attributes: further models, optimisers, `ElasticSampler`s and objects, by name.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any):
        values = {"model": model, "optimizer": optimizer, **attributes}
        self._parts = {name: each for name, each in values.items() if isinstance(each, PARTS)}
        vars(self).update(self._parts)
        super().__init__(**{name: each for name, each in values.items() if name not in self._parts})
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_parts", ()):
            self._parts[name] = value
            self._kept[name] = copy.deepcopy(value.state_dict())
        super().__setattr__(name, value)

    def save(self) -> None:
        self._kept = {name: copy.deepcopy(each.state_dict()) for name, each in self._parts.items()}
        super().save()

    def restore(self) -> None:
        for name, each in self._parts.items():
            each.load_state_dict(copy.deepcopy(self._kept[name]))
        super().restore()

    def sync(self) -> None:
        """Collective. Load rank 0's state, and save it."""
        for each in self._parts.values():
            if isinstance(each, torch.nn.Module):
                broadcast_parameters(each.state_dict(), root_rank=0)
            elif isinstance(each, torch.optim.Optimizer):
                broadcast_optimizer_state(each, root_rank=0)
            else:
                each.load_state_dict(broadcast_object(each.state_dict()))
        super().sync()

    def reset(self) -> None:
        for each in self._parts.values():
            if isinstance(each, ElasticSampler):
                each.reset()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distributes a data set's samples among the ranks; after a reset, the remaining ones among the remaining ranks.

    Put it into the `TorchState`, call `record_batch` after each batch and `set_epoch` after each epoch. Some of an
    epoch's samples are used twice if their number is not divisible by the number of ranks.

    Args:
        dataset: its length must not change.
        shuffle: use another order in each epoch.
        seed: of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: no sample is used yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has trained on a batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining samples among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        padded = remaining + (remaining * self.num_replicas)[: self.total_size - len(remaining)]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


PARTS = torch.nn.Module, torch.optim.Optimizer, ElasticSampler  # classes with a state_dict
