"""Activations that a stage sends to the next one, and their gradients, which it receives."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import ConfigError

Values = tuple[Any, ...]  # tensors, None, and tuples, lists or dicts of them


class Described(NamedTuple):
    """A tensor of a boundary, for which the next stage allocates memory.

    With `grad` a gradient comes back, zeros if there is none, so that other ranks need not know about frozen layers.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Layout(NamedTuple):
    """The structure of a boundary's values: positions of tensors, with their dtypes and shapes."""

    tree: pytree.TreeSpec
    tensors: tuple[Described | None, ...]  # None for None

    @property
    def with_gradient(self) -> list[Described]:
        return [tensor for tensor in self.tensors if tensor is not None and tensor.grad]

    def __str__(self) -> str:
        return ", ".join(str(tensor) for tensor in self.tensors)

    def encode(self) -> bytes:
        tensors = [t and [str(t.dtype).removeprefix("torch."), list(t.shape), t.grad] for t in self.tensors]
        return json.dumps([pytree.treespec_dumps(self.tree), tensors]).encode()

    @staticmethod
    def decode(data: bytes) -> Layout:
        tree, tensors = json.loads(data)
        described = (t and Described(getattr(torch, t[0]), tuple(t[1]), t[2]) for t in tensors)
        return Layout(pytree.treespec_loads(tree), tuple(described))


class Boundary:
    """One rank's end of the boundary between two stages; both ends if one rank has both stages.

    Values and gradients of micro-batches are passed in order. The layout of values is sent once for inputs of the same
    shapes, before the first values, and must not change; later only tensors are sent, one message each.

    Args:
        comm: has the ranks at both ends.
        stage: the stage before the boundary.
        peer: the rank at the other end, until `start` names others.
        device: of received tensors.
        values: what they are, for messages.
    """

    def __init__(self, comm: Communicator, stage: int, peer: int, device: torch.device, values: str | None = None):
        self._comm, self._device = comm, device
        self._what = values or f"what stage {stage} returns"
        self._layouts: dict[Hashable, Layout] = {}
        self._sending: list[tuple[Request, Tensor]] = []
        self._values_tag, self._gradients_tag = tags = 2 * stage, 2 * stage + 1
        # By tag: tensors being received, the oldest first, with their requests; ranks; queues if both ends are here.
        self._posted: dict[int, deque[tuple[list[Tensor], list[Request]]]] = {tag: deque() for tag in tags}
        self._peers: dict[int, Iterator[int]] = {tag: itertools.repeat(peer) for tag in tags}
        self._local_queues: dict[int, deque[list[Tensor]]] | None = None
        if peer == comm.rank:
            self._local_queues = {tag: deque() for tag in tags}

    def start(self, peers: Iterable[int]) -> None:
        """Start a batch. `peers` has the rank at the other end for each of its micro-batches."""
        peers = list(peers)
        self._peers = {tag: iter(peers) for tag in self._peers}

    # --- the stage before -----------------------------------------------------------------------------------------
    def send(self, key: Hashable, values: Values) -> list[Tensor]:
        """Start sending values; return the tensors whose gradients will come back, in order.

        Args:
            key: the shapes of the inputs, which determine the layout; known at both ends.
            values: sent from their own memory; they must not change before `wait`.

        Raises:
            ConfigError: the values hold something else than tensors, or their layout has changed for this `key`.
        """
        leaves, tree = pytree.tree_flatten(values)
        layout = Layout(tree, tuple(self._describe(leaf) for leaf in leaves))
        known_layout = self._layouts.setdefault(key, layout)
        messages = [leaf for leaf in leaves if leaf is not None]
        if known_layout is layout and self._local_queues is None:
            header = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
            messages = [torch.tensor([len(header)]), header, *messages]
        elif known_layout != layout:
            raise ConfigError(
                f"shapes and types of {self._what} must follow from those of the batch; got {layout}, and "
                f"{known_layout} before for a batch of the same shapes. Pad to a length that the batch tells."
            )
        self._send(messages, self._values_tag)
        return [leaf for leaf, tensor in zip(leaves, layout.tensors, strict=True) if tensor is not None and tensor.grad]

    def _describe(self, leaf: Any) -> Described | None:
        """Describe a value for the other end; raise ConfigError if it is neither a tensor nor None."""
        if leaf is None:
            return None
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"{self._what} must be tensors, and tuples, lists or dicts of them; got {type(leaf).__name__}. Cut the "
                "model elsewhere, or make it a tensor."
            )
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        return Described(leaf.dtype, tuple(leaf.shape), differentiable and torch.is_grad_enabled())

    def post_gradients(self, key: Hashable) -> None:
        """Start receiving the gradients of the next micro-batch, after its values have been sent."""
        if key in self._layouts:
            self._post(self._gradients_tag, self._layouts[key].with_gradient)

    def receive_gradients(self, key: Hashable) -> list[Tensor]:
        """Receive the gradients of the tensors that `send` has returned."""
        return self._receive(self._gradients_tag, self._layouts[key].with_gradient)

    # --- the stage behind -----------------------------------------------------------------------------------------
    def post(self, key: Hashable) -> None:
        """Start receiving the values of the next micro-batch, if their layout is known."""
        if key in self._layouts:
            self._post(self._values_tag, [tensor for tensor in self._layouts[key].tensors if tensor is not None])

    def receive(self, key: Hashable) -> tuple[list[Tensor | None], Layout]:
        """Receive the values of a micro-batch: the tensors, with None where None was sent, and their layout."""
        if key not in self._layouts:
            peer = next(self._peers[self._values_tag])
            length = torch.empty(1, dtype=torch.int64)
            self._comm.irecv(length, peer, self._values_tag).wait()
            header = torch.empty(int(length), dtype=torch.uint8)
            self._comm.irecv(header, peer, self._values_tag).wait()
            self._layouts[key] = Layout.decode(header.numpy().tobytes())
            self._peers[self._values_tag] = itertools.chain([peer], self._peers[self._values_tag])  # for the tensors
        layout = self._layouts[key]
        tensors = iter(self._receive(self._values_tag, [tensor for tensor in layout.tensors if tensor is not None]))
        return [None if tensor is None else next(tensors) for tensor in layout.tensors], layout

    def send_gradients(self, gradients: list[Tensor]) -> None:
        """Start sending the gradients of the values that have one, in order."""
        self._send(gradients, self._gradients_tag)

    # --- messages -------------------------------------------------------------------------------------------------
    def _send(self, tensors: list[Tensor], tag: int) -> None:
        """Start sending tensors to the tag's next peer, one message each; to the same rank by a queue."""
        tensors = [tensor.detach() for tensor in tensors]
        if self._local_queues is not None:
            # Copies, because the next stage may change them in place.
            self._local_queues[tag].append([tensor.clone() for tensor in tensors])
            return
        self._sending = [(request, tensor) for request, tensor in self._sending if not request.done()]
        peer = next(self._peers[tag])
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.contiguous().view(-1)
                self._sending.append((self._comm.isend(flat, peer, tag), flat))

    def _post(self, tag: int, described: list[Described]) -> None:
        """Start receiving tensors of these dtypes and shapes; `_receive` waits for them."""
        if self._local_queues is not None:
            return
        peer = next(self._peers[tag])
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in described]
        requests = [self._comm.irecv(t.view(-1), peer, tag) for t in tensors if t.numel()]
        self._posted[tag].append((tensors, requests))

    def _receive(self, tag: int, described: list[Described]) -> list[Tensor]:
        """Wait for the oldest tensors that `_post` has started to receive; call it first if there are none."""
        if self._local_queues is not None:
            return self._local_queues[tag].popleft()
        if not self._posted[tag]:
            self._post(tag, described)
        tensors, requests = self._posted[tag].popleft()
        for request in requests:
            request.wait()
        return tensors

    def wait(self) -> None:
        """Wait for all sends."""
        for request, _ in self._sending:
            request.wait()
        self._sending.clear()
