"""A batch that was read whole, as the list of samples that torch's DataLoader expects."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

Sample = tuple[Tensor, ...]


class Samples(UserList[Sample]):
    """A whole batch that acts as the list of its samples (x, y).

    torch's `default_collate` looks only at the first sample and gets the batch as it was read: to split it into 128
    small images and join them again takes several times as long as to read it. Other collate functions get views of
    the batch. Copies and pickles are plain lists.
    """

    _batch: Sample | None
    _source: tuple[Callable[[Sequence[int]], Sample], Sequence[int]]

    @classmethod
    def of(cls, read: Callable[[Sequence[int]], Sample], indices: Sequence[int]) -> Samples:
        samples = cls.__new__(cls)
        samples._batch, samples._source = read(indices), (read, indices)
        return samples

    @cached_property
    def data(self) -> list[Sample]:  # type: ignore[override]
        return list(zip(*(tensor.unbind() for tensor in self._whole())))

    def hand_over(self) -> list[Tensor] | None:
        """Return the batch to a new owner, who may write to it; None if it was split, as samples may have changed."""
        if "data" in self.__dict__:
            return None
        batch, self._batch = self._whole(), None
        return list(batch)

    def _whole(self) -> Sample:
        if self._batch is None:  # handed over
            read, indices = self._source
            self._batch = read(indices)
        return self._batch

    def __getitem__(self, index: Any) -> Any:
        if index == 0 and "data" not in self.__dict__:
            x, y = self._whole()
            return First((x[0], y[0]))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.data)

    def __copy__(self) -> list[Sample]:  # type: ignore[override]
        return list(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.data,)


class First(Sample):
    """The first sample of a whole batch; by this type torch's `default_collate` finds `join`."""

    __slots__ = ()


def join(samples: Any, *, collate_fn_map: Any) -> Any:
    """Return a whole batch as it was read if torch would stack its samples; else do as torch."""
    stacks = collate_fn_map.get(Tensor) is collate_tensor_fn and tuple not in collate_fn_map
    batch = samples.hand_over() if stacks and isinstance(samples, Samples) else None
    return collate([tuple(s) for s in samples], collate_fn_map=collate_fn_map) if batch is None else batch


default_collate_fn_map[First] = join
