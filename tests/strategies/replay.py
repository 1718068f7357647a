"""Asynchronous servers by hand: who posted what, and the parameters that follow from it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from hpcdist.compress import spans
from hpcdist.data import EpochPlan
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.placement import create_shards
from strategies import problem


class Arrival(NamedTuple):
    """A gradient as a server took it from its slot."""

    source: int
    clock: int
    gradient: torch.Tensor


def logged(cls):
    """The strategy, with the arrivals at every server in `arrivals[rank]`."""
    arrivals: dict[int, list[Arrival]] = defaultdict(list)

    def note(strategy, request):
        arrival = Arrival(request.source, request.clocks[0], torch.cat([t.clone() for t in request.tensors]))
        if request.weight:  # else it is of a step without samples, and counts for nothing
            arrivals[strategy.comm.rank].append(arrival)

    found = watched(cls, note)
    found.arrivals = arrivals
    return found


def asynchronous(arrivals, workers, *, optimizer, samples, batch=4):
    """The parameters of one epoch, every gradient computed from the parameters of its clocks and applied alone.

    Args:
        arrivals: of each server, in order; server i has shard i.
        workers: their ranks.
    """
    servers = sorted(arrivals)
    modules = [problem.model() for _ in servers]
    models = [FlatModel(module) for module in modules]
    optimizers = [problem.OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    ranges = [shard.ranges[0] for shard in create_shards(models[0].params, len(servers), spans(models[0]))]
    history = [[model.params[0][slice(*r)].clone()] for model, r in zip(models, ranges, strict=True)]
    plan = EpochPlan(samples, len(workers), batch, seed=1)
    at, count = [0] * len(servers), [defaultdict(int) for _ in servers]
    clocks = [[log.clock for log in arrivals[server]] for server in servers]
    nth = [_numbered(arrivals[server]) for server in servers]
    while any(i < len(arrivals[server]) for i, server in zip(at, servers, strict=True)):
        for s, server in enumerate(servers):
            if at[s] == len(arrivals[server]):
                continue
            source = arrivals[server][at[s]].source
            request = (source, count[s][source])
            known = [clocks[other][nth[other][request]] for other in range(len(servers))]
            if any(clock >= len(past) for clock, past in zip(known, history, strict=True)):
                continue  # another server comes first
            found = torch.cat([past[clock] for past, clock in zip(history, known, strict=True)])
            gradient = _gradient(found, plan.indices(request[1], workers.index(source)))
            if not torch.equal(gradient[slice(*ranges[s])], arrivals[server][at[s]].gradient):
                raise AssertionError(f"request {request} isn't the gradient at the parameters of its clocks {known}")
            _load(models[s], history[s][-1], ranges[s])
            models[s].grads[0].copy_(gradient)
            models[s].gradients.release([True] * len(models[s].slots))
            optimizers[s].step()
            history[s].append(models[s].params[0][slice(*ranges[s])].clone())
            count[s][source] += 1
            at[s] += 1
    return torch.cat([past[-1] for past in history])


def _numbered(log):
    """Where the n-th request of a source is: {(source, n): index}."""
    seen, found = defaultdict(int), {}
    for i, arrival in enumerate(log):
        found[arrival.source, seen[arrival.source]] = i
        seen[arrival.source] += 1
    return found


def _gradient(params, indices):
    module = problem.model()
    model = FlatModel(module)
    model.params[0].copy_(params)
    problem.loss(module, indices).backward()
    model.gradients.collect()
    return model.grads[0]


def _load(model, values, within):
    model.params[0][slice(*within)] = values


def watched(cls, note):
    """The strategy; `note(strategy, request)` comes before each request that one of its servers deals with."""

    class Watched(cls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if self.replica.children:
                self._receive, self.server.receive = self.server.receive, self._note

        def _note(self, request):
            note(self, request)
            self._receive(request)

    return Watched
