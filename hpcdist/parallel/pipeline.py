"""Train a model that is cut into stages, one or several per rank, by a schedule of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cache
from itertools import pairwise, zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hpcdist.comm.communicator import TAG_LIMIT, Communicator, Traffic
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.parallel import schedules
from hpcdist.parallel.agreement import Agreement, PartOfModel, TiedParameters
from hpcdist.parallel.boundary import Boundary, Layout, Values
from hpcdist.parallel.cut import Cut, cut_of
from hpcdist.parallel.grid import Grid
from hpcdist.parallel.layers import Make, build, outline, unwrapped
from hpcdist.parallel.routing import ROUTINGS, Routing, composed
from hpcdist.parallel.schedules import Operation
from hpcdist.parallel.stage import Stage

Scale = Callable[[Tensor], Tensor] | None  # of a GradScaler
_LOSS = TAG_LIMIT - 1
_THIRDS = {"F": 1, "B": 2, "I": 1, "W": 1}  # of a step: a backward pass takes twice as long as a forward pass


class Pipeline(PartOfModel):
    """Collective. This rank's stages of a model. Parameters keep the names of the whole model.

    A batch is divided into micro-batches along the first dimension, as evenly as possible. Gradients are of the
    mean loss of the micro-batches, weighted by samples: for a loss that is a mean over samples, of the batch's loss.
    Layers see micro-batches, as in gradient accumulation: dropout samples a mask for each, and batch norm takes the
    statistics of each.

    Messages of a rank in a step: for each micro-batch and boundary the values there, and their gradients back.

    Args:
        make: returns the model: a Chain, an nn.Sequential or a list of layers. Each rank calls the function,
            but builds only the layers of its stages. Or a model, of which each rank keeps the layers of its stages.
        loss: (outputs, targets) -> the mean loss over a micro-batch, a scalar.
        grid: its ranks `inner` are the stages, in order.
        cut: layers of each stage, or their numbers; None balances the numbers of parameters.
        micro_batches: number of micro-batches; fewer if a batch has fewer samples.
        schedule: the order of passes, by name.
        chunks: stages of each rank; more than 1 with the schedule `interleaved`.
        recompute: keep only the inputs of a stage for its backward pass, and compute the rest again.
        routing: straight, within a replica; or random, to a replica that is sampled for each micro-batch and boundary,
            see `Routing`.
        seed: of random routing.
        device: where this rank computes.

    Attributes:
        cut: the layers of each stage.
        stages: the numbers of this rank's stages.
        n_stages: the number of stages on all ranks.
        is_first, is_last: this rank has the first stage, the last stage.
        routing: random routes; None for straight routes, or with one replica.

    Raises:
        ConfigError: the model can't be cut so.

    Reference: Yanping Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism",
    2019; Deepak Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    2021.
    """

    def __init__(
        self,
        make: Callable[[], Any] | nn.Module | Sequence[nn.Module],
        loss: Callable[[Any, Any], Tensor],
        grid: Grid,
        *,
        cut: Cut | Sequence[int] | None = None,
        micro_batches: int = 4,
        schedule: str = "one_f_one_b",
        chunks: int = 1,
        recompute: bool = False,
        routing: str = "straight",
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if routing not in ROUTINGS:
            raise UnknownNameError("routing", routing, ROUTINGS)
        self.grid, self.optimizers = grid, []
        self._loss, self._micro_batches, self._chunks, self._recompute = loss, micro_batches, chunks, recompute
        self._set_more_follow: list[Callable[[bool], None]] = []  # of the optimisers' gradients, in a pass
        self._table = cache(lambda parts: schedules.create(schedule, grid.inner.size, parts, chunks))
        self._table(micro_batches)  # refused before anything is built
        self.routing = Routing(grid, seed) if routing == "random" and grid.replicas > 1 else None
        self._device = torch.device("cpu") if device is None else torch.device(device)
        self._build((lambda: make) if isinstance(make, (nn.Module, list, tuple)) else cast(Make, make), cut)

    def _build(self, make: Make, cut: Cut | Sequence[int] | None) -> None:
        """Cut the model, build this rank's layers, and set up its stages and their boundaries."""
        comm, ranks = self.grid.inner, self.grid.inner.size
        whole, n_stages = outline(make), ranks * self._chunks
        self.cut = cut_of(whole, n_stages, cut)
        layers_of_rank = [[n for s in range(r, n_stages, ranks) for n in self.cut.layers(s)] for r in range(ranks)]
        local_layers = build(make, layers_of_rank[comm.rank], self._device)
        for name, layer in local_layers._modules.items():
            self.add_module(name, layer)
        self.stages, self.n_stages = tuple(range(comm.rank, n_stages, ranks)), n_stages
        self.is_first, self.is_last = self.stages[0] == 0, self.stages[-1] == n_stages - 1
        self._chain = (local_layers,)  # a tuple hides it from nn.Module: its layers are here already
        index_of = {number: position for position, number in enumerate(layers_of_rank[comm.rank])}
        self._stages: dict[int, Stage] = {}
        self._boundaries: dict[int, Boundary] = {}  # by the stage before
        for stage in self.stages:
            layers = self.cut.layers(stage)
            self._stages[stage] = Stage(stage, local_layers.part(index_of[n] for n in layers), layers, self._recompute)
            for boundary, neighbor in ((stage - 1, stage - 1), (stage, stage + 1)):
                if 0 <= neighbor < n_stages and boundary not in self._boundaries:
                    self._boundaries[boundary] = Boundary(self._between, boundary, neighbor % ranks, self._device)
        # With random routes the last stages send each micro-batch's targets to the replica where its outputs end.
        ends = ("sent", "received") if self.routing is not None and self.is_last else ()
        self._targets = [Boundary(self._between, n_stages, 0, self._device, "targets") for _ in ends]
        self.tied = TiedParameters(comm, whole, layers_of_rank, local_layers)
        unshared = len(list(local_layers.parameters())) == sum(len(stage.parameters) for stage in self._stages.values())
        self.agreement = Agreement(comm.split(0), self.tied.repeated, announces=unshared and not self.tied)

    # --- training -------------------------------------------------------------------------------------------------
    def step(self, x: Any, y: Any, *, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Collective. Take a step of all `optimizers` on a batch; return its mean loss, shape (), float64.

        Args:
            x: inputs: a tensor, or a tuple, list or dict of tensors; the same on all ranks of a replica.
            y: targets, likewise.
            scaler: scales the loss, for float16. If gradients overflow in one stage, the whole replica skips the step.

        Raises:
            ConfigError: no DistributedOptimizer trains the model.
        """
        if not self.optimizers:
            raise ConfigError(
                "model.step must be called once a DistributedOptimizer trains the model; got none. Make it with what "
                "hpcdist.pipeline has returned, or call model.forward_backward and the steps of your own optimisers."
            )
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.forward_backward(x, y, scaled=None if scaler is None else scaler.scale)
        for optimizer in self.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Collective in the replica. Scale gradients down to the 2-norm `max_norm`, over all stages; return the norm.

        A tied parameter counts once.
        """
        return self.agreement.clip(list(self.parameters()), max_norm)

    def forward_backward(self, x: Any, y: Any, *, scaled: Scale = None, micro_batches: int | None = None) -> Tensor:
        """Collective in the replica. Add a batch's gradients to those of the parameters; return its mean loss.

        Args:
            x, y: as for `step`.
            scaled: multiplies the loss by the scale of a GradScaler before its backward pass; None leaves it.
            micro_batches: the number for this batch, e.g. for an epoch's smaller last one; the same on all ranks.

        Returns:
            The loss, not scaled, on all ranks of the replica; shape (), float64.
        """
        batch = _Batch(x, y, micro_batches or self._micro_batches, self._device, scaled)
        operations = self._table(batch.parts)[self.grid.inner.rank]
        self._start_routes(batch, trains=True)
        if scaled is not None:
            scaled(torch.zeros((), device=self._device))  # it starts with the first loss, which only one rank has
        with ExitStack() as stack:
            joined = [optimizer.strategy.model.gradients.joined() for optimizer in self.optimizers]
            self._set_more_follow = [stack.enter_context(context) for context in joined]
            stack.enter_context(self._between.overlapping())
            self.tied.start_gradients()
            for operation, following in zip_longest(operations, operations[1:]):
                received = self._incoming(operation)[1](batch.keys[operation.micro_batch])
                if following is not None:  # receive its input during this operation
                    self._incoming(following)[0](batch.keys[following.micro_batch])
                self._run(operation, received, batch)
            self._wait()
            self.tied.sum_gradients()
            if scaled is not None:
                agreement = self.agreement if self.routing is None else self.routing.agreement
                agreement.spread_overflow(p.grad for p in self.parameters() if p.grad is not None)
            return self._spread(batch.loss)

    @property
    def _between(self) -> Communicator:
        """Where stages exchange values: the replica, or the whole grid where these take random routes."""
        return self.grid.inner if self.routing is None else self.routing.comm

    def _start_routes(self, batch: _Batch, *, trains: bool) -> None:
        """Collective if routes are random. Sample where the micro-batches go, and send the targets there."""
        routing = self.routing
        if routing is None:
            return
        permutations = None
        if trains:
            steps = self.optimizers[0].strategy.steps if self.optimizers else 0
            weights = [optimizer.strategy.model.gradients.weight for optimizer in self.optimizers]
            permutations = routing.sample(steps, (weights, batch.keys), self.n_stages - 1, batch.parts)
        stages = self.grid.stages
        for number, boundary in self._boundaries.items():
            behind = number in self.stages  # this rank has the stage before the boundary, the peer the one behind
            peer = (number + behind) % stages
            route = None if permutations is None else permutations[number]
            boundary.start(routing.ranks(route, batch.parts, peer, behind=behind))
        if permutations is None:
            return
        batch.keys = [("drawn", key) for key in batch.keys]  # these keys are equal in all replicas
        if self.is_last:
            whole_route = composed(permutations)
            for end, behind in zip(self._targets, (True, False)):
                end.start(routing.ranks(whole_route, batch.parts, stages - 1, behind=behind))
            for part, key in enumerate(batch.keys):
                self._targets[0].send(key, (batch.part_of(batch.y, part),))
            batch.arrives = self._targets[1].receive

    def _incoming(self, operation: Operation) -> tuple[Callable[[Hashable], None], Callable[[Hashable], Any]]:
        """Return two functions: the first starts to receive the input of an operation, the second waits for it.

        The input is (tensors, layout) for F, gradients for B and I, or None if no other stage sends it.
        """
        kind, stage, _ = operation
        if kind == "F" and stage > 0:
            return self._boundaries[stage - 1].post, self._boundaries[stage - 1].receive
        if kind in "BI" and stage < self.n_stages - 1:
            return self._boundaries[stage].post_gradients, self._boundaries[stage].receive_gradients
        return (lambda key: None), (lambda key: None)

    def _run(self, operation: Operation, received: Any, batch: _Batch) -> None:
        """Execute an operation on its input, and send the result; see `_incoming`."""
        operation_kind, number, part = operation
        stage = self._stages[number]
        thirds = _THIRDS[operation_kind] + (operation_kind in "BI" and self._recompute)  # for virtual clocks
        # After the last micro-batch the gradients of the stage's weights are complete.
        is_last_part = operation_kind in "BW" and part == batch.parts - 1
        for set_more_follow in self._set_more_follow:
            set_more_follow(not is_last_part or batch.scaled is not None)
        self.grid.inner.compute(thirds / 3 / self.n_stages * batch.shares[part])
        if operation_kind == "F":
            values = stage.forward(self._values(stage, received, batch, part, grads=True))
            if number < self.n_stages - 1:
                stage.keep_outputs(part, self._boundaries[number].send(batch.keys[part], values))
            else:
                loss = self._loss(unwrapped(values), batch.target(part)) * batch.shares[part]
                batch.loss += loss.detach().to(batch.loss)
                stage.keep_outputs(part, [loss if batch.scaled is None else batch.scaled(loss)])
        elif operation_kind == "W":
            stage.backward_weights(part)
        else:
            gradients = (stage.backward if operation_kind == "B" else stage.backward_inputs)(part, received)
            if number > 0:
                self._boundaries[number - 1].send_gradients(gradients)

    def _values(self, stage: Stage, received: Any, batch: _Batch, part: int, grads: bool) -> Values:
        """Return a stage's input for micro-batch `part`: the batch's own for stage 0, else the activations `received`.

        With `grads`, those that the layout marks get gradients in the backward pass, to be sent back.
        """
        if stage.number == 0:
            return self._chain[0].values(batch.part_of(batch.x, part))
        tensors, layout = received
        with_gradient = [grads and tensor is not None and tensor.grad for tensor in layout.tensors]
        return stage.enter(part, tensors, layout.tree, with_gradient)

    def _wait(self) -> None:
        for boundary in (*self._boundaries.values(), *self._targets):
            boundary.wait()

    def _spread(self, total: Tensor) -> Tensor:
        """Collective in the replica. Send the loss from the last stage's rank to the others."""
        comm, last = self.grid.inner, self.grid.inner.size - 1
        if comm.rank == last:
            for request in [comm.isend(total, rank, _LOSS) for rank in range(last)]:
                request.wait()
        else:
            comm.irecv(total, last, _LOSS).wait()
        return total[0]

    # --- evaluation -----------------------------------------------------------------------------------------------
    def forward(self, x: Any) -> Any:
        """Collective in the replica. Compute outputs, without gradients; None on ranks without the last stage.

        Raises:
            ConfigError: the model is in training mode and gradients are on.
        """
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                "a model in stages must be called under torch.no_grad() in training, as gradients don't go through "
                "stages by themselves; got a call with gradients. To train, call model.step(x, y), or "
                "model.forward_backward(x, y) and optimizer.step()."
            )
        outputs = []
        with torch.no_grad():
            batch = _Batch(x, None, self._micro_batches, self._device)
            self._start_routes(batch, trains=False)
            for operation in self._table(batch.parts)[self.grid.inner.rank]:
                kind, number, part = operation
                if kind != "F":
                    continue
                stage = self._stages[number]
                received = self._incoming(operation)[1](batch.keys[part])
                values = stage.forward(self._values(stage, received, batch, part, grads=False))
                if number < self.n_stages - 1:
                    self._boundaries[number].send(batch.keys[part], values)
                else:
                    outputs.append(unwrapped(values))
        self._wait()
        return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs) if outputs else None

    def traffic(self) -> Traffic:
        total = super().traffic() + self.tied.traffic
        return total if self.routing is None else total + self.routing.traffic

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """Copy the layers, for a moving average; communicators are shared, and no optimiser trains the copy."""
        shared = (self.grid, self.tied, self.agreement, self._loss, self.routing, *self._targets)
        shared = (*shared, *self._boundaries.values())
        memo |= {id(item): item for item in shared} | {id(self.optimizers): []}
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def share_values(self) -> None:
        self.tied.share_values()

    def close(self) -> None:
        if self.routing is not None:
            self.routing.close()
        self.agreement.comm.close()
        self.tied.close()


class _Batch:
    """A batch in micro-batches (parts): inputs `x` and targets `y`; `scaled` applies a GradScaler's scale to a loss."""

    def __init__(self, x: Any, y: Any, micro_batches: int, device: torch.device, scaled: Scale = None):
        self.x, self.y, self.scaled, self._device = x, y, scaled, device
        # Receives the next micro-batch's targets, where they come from another replica.
        self.arrives: Callable[[Hashable], tuple[list[Tensor | None], Layout]] | None = None
        self.loss = torch.zeros(1, dtype=torch.float64)  # the sum of the losses so far, not scaled
        samples = _samples(x)
        self.parts = min(micro_batches, samples)  # number of micro-batches
        starts = [samples * part // self.parts for part in range(self.parts + 1)]
        self._slices = [slice(*pair) for pair in pairwise(starts)]
        self.shares = [(part.stop - part.start) / samples for part in self._slices]  # of the batch's samples in each
        amp = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        state = (torch.is_grad_enabled(), amp)
        leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
        # By micro-batch: shapes and types of its inputs, which determine those at the boundaries.
        self.keys: list[Hashable] = [
            (state, *((leaf.dtype, part.stop - part.start, *leaf.shape[1:]) for leaf in leaves))
            for part in self._slices
        ]

    def target(self, part: int) -> Any:
        """Return the targets of micro-batch `part`, which is the next one at the last stage."""
        if self.arrives is None:
            return self.part_of(self.y, part)
        tensors, layout = self.arrives(self.keys[part])
        return pytree.tree_unflatten(tensors, layout.tree)[0]

    def part_of(self, tensors: Any, part: int) -> Any:
        """Return the samples of micro-batch `part` in `x` or `y`, on the device."""
        piece, device = self._slices[part], self._device
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[piece].to(device), tensors)


def _samples(x: Any) -> int:
    lengths = {len(leaf) for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) != 1 or lengths == {0}:
        raise ConfigError(
            "a batch in micro-batches must be of tensors with one sample or more each along dimension 0, as many in "
            f"all; got {sorted(lengths) or 'no tensor'} samples. Give inputs whose first dimension is the batch."
        )
    return lengths.pop()
