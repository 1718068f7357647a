"""Entries of a strategy's state: what a checkpoint holds, and how each goes on with another number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from hpcdist.strategies.common.state import (
    Entry,
    attribute,
    dropped,
    first,
    load_entries,
    mean,
    part,
    reshard_entries,
    save_entries,
    tensors,
    zeros,
)


class Counter:
    def __init__(self):
        self.calls = 0

    def state(self):
        return self.calls

    def load_state(self, state):
        self.calls = state


def _declare(owner):
    fresh = Entry("fresh", lambda: owner.fresh, lambda value: setattr(owner, "fresh", value), dropped("new"))
    return [attribute(owner, "steps"), fresh, *part("counter", owner.counter, sum)]


def _owner(steps, counter):
    return SimpleNamespace(steps=steps, fresh=str(steps), counter=counter)


def test_entries_come_back_as_they_were_saved():
    saved = save_entries(_declare(_owner(3, Counter())))
    assert saved == {"steps": 3, "fresh": "3", "counter": 0}
    other = _owner(0, Counter())
    load_entries(_declare(other), {**saved, "counter": 5, "of another version": 1})
    assert (other.steps, other.fresh, other.counter.calls) == (3, "3", 5)


def test_each_entry_is_carried_over_in_its_own_way():
    states = [{"steps": 3, "fresh": "a", "counter": 2}, {"steps": 4, "fresh": "b", "counter": 5}]
    assert reshard_entries(_declare(_owner(0, Counter())), states) == {"steps": 3, "fresh": "new", "counter": 7}
    assert reshard_entries(_declare(_owner(0, None)), states) == {"steps": 3, "fresh": "new"}


def test_only_an_optional_entry_may_be_missing():
    owner, lacking = _owner(0, Counter()), {"steps": 3, "fresh": "a"}
    load_entries(_declare(owner), lacking)
    assert owner.steps == 3 and owner.counter.calls == 0
    assert reshard_entries(_declare(owner), [lacking]) == {"steps": 3, "fresh": "new"}
    with pytest.raises(KeyError, match="fresh"):
        load_entries(_declare(owner), {"steps": 3})


def test_means_of_integers_are_rounded():
    columns = [[torch.tensor([1.0, 2.0]), torch.tensor([1])], [torch.tensor([2.0, 4.0]), torch.tensor([2])]]
    whole, integers = mean(columns)
    assert whole.tolist() == [1.5, 3.0] and whole.dtype == torch.float32
    assert integers.tolist() == [2] and integers.dtype == torch.int64


def test_what_begins_anew_does_so_though_no_rank_saved_it():
    velocity = [torch.ones(2), torch.ones(3)]
    entries = [tensors("velocity", velocity, zeros(velocity)), tensors("centre", [torch.ones(1)], first)]
    resharded = reshard_entries(entries, [{}, {}])
    assert resharded.keys() == {"velocity"}
    load_entries(entries, resharded)
    assert not any(tensor.any() for tensor in velocity) and save_entries(entries)["centre"] == [torch.ones(1)]
