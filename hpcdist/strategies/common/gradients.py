"""Clip a rank's gradients, and leave out updates of gradients that are not finite."""

from __future__ import annotations

import cmath
import functools
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel
from hpcdist.parallel.agreement import Agreement, clip_gradients
from hpcdist.records.digest import tensor_bytes
from hpcdist.strategies.common.records import Outcome

FIRST_STEPS = 2  # whose gradients are compared among ranks
_PIECES = 256  # of a tensor, whose bits are summed apart, so that their order counts


class LocalGradients:
    """The gradients of a rank's replica in the current step.

    Attributes:
        checksums: of this rank's own gradients, before they are averaged, in each of its first steps: 0 where they are
            zero. None where nobody wants them.
        changed: the loop has changed them in this step since the backward pass, other than by the scale of the loss.
        ignores_nonfinite: this step is taken whatever the gradients are.
        used: which parameters have had a gradient in an update here since `take_used`, bool, shape (parameters,).

    Args:
        policy: `on_nonfinite` of the strategy's options: stop, skip or ignore.
        clip_norm: largest 2-norm of all gradients together; None does not clip.
        stages: agrees with the ranks that have the replica's other stages; None where this rank has the whole model.
    """

    def __init__(
        self, comm: Communicator, model: FlatModel, policy: str, clip_norm: float | None, stages: Agreement | None
    ):
        self.clip_norm, self.policy = clip_norm, policy
        self._comm, self._model, self._stages = comm, model, stages
        self.start(1, False, changed=False)
        self.checksums: list[int] | None = None
        self.used = torch.zeros(len(model.slots), dtype=torch.bool)
        self._looked: list[int] = []  # checksums of this step's gradients, perhaps bucket by bucket

    def start(self, step: int, skips: bool, *, changed: bool) -> None:
        """Begin a step; `skips` leaves out its update where gradients are not finite, whatever the policy says."""
        self._step, self._skips, self.changed = step, skips or self.policy == "skip", changed
        self.ignores_nonfinite = self.policy == "ignore" and not skips

    def nonfinite(self, bucket: Bucket | None = None, *, again: bool = False) -> list[str]:
        """Name the parameters whose gradient holds NaN or infinity; none if these are ignored.

        Collective in the replica, of all its stages, unless `again` or of a bucket. Reads the gradients once, as NaN
        and infinity survive in a sum. Only if the sum is not finite (it may also overflow) is each gradient looked at.
        Waits for the device.

        Args:
            bucket: look at its gradients, on this rank.
            again: look at this rank's gradients after they were sent. Before, in the first steps, a checksum is taken.
        """
        flats = self._model.grads if bucket is None else [bucket.grads]
        tensors = flats or [slot.tensor.grad for slot in self._model.slots if slot.tensor.grad is not None]
        if not again and self.checksums is not None and len(self.checksums) < FIRST_STEPS:
            self._looked.append(functools.reduce(_checksum, tensors, 0))
        if self.ignores_nonfinite:
            return []
        sums = [tensor.sum() for tensor in tensors]
        if len(sums) > 1 and not sums[0].is_cpu and len({each.device for each in sums}) == 1:
            sums = list(torch.stack(sums).cpu())  # one wait for the device
        names: list[str] = []
        if not all(cmath.isfinite(each.item()) for each in sums):
            held = [(s.name, s.tensor.grad) for s in self._model.slots if bucket is None or s.name in bucket.params]
            names = [name for name, grad in held if grad is not None and not torch.isfinite(grad).all()]
        if self._stages is None or again or bucket is not None:
            return names
        return self._stages.nonfinite({0: names} if names else {}).get(0, [])

    def done(self) -> None:
        """End the step: what is looked at from here on belongs to the next one."""
        if self.checksums is not None and len(self.checksums) < FIRST_STEPS:
            self.checksums.append(hash(tuple(self._looked)) if any(self._looked) else 0)
        self._looked, self.ignores_nonfinite = [], self.policy == "ignore"

    def clip(self, weight: float = 1.0) -> None:
        """Collective in the replica. Scale all gradients down to the norm `clip_norm`, where theirs is larger.

        Args:
            weight: the factor of the gradients, by which the norm is multiplied too.
        """
        if self.clip_norm is None:
            return
        parameters, largest = [slot.tensor for slot in self._model.slots], self.clip_norm * weight
        if self._stages is None:
            nn.utils.clip_grad_norm_(parameters, largest)
        else:
            clip_gradients(parameters, largest, self._stages.norm(parameters))

    def leave_out(self, names_of: dict[int, list[str]]) -> str:
        """Leave out the update: return the event for the record.

        Args:
            names_of: the parameters' names, by rank, or by replica where its ranks have a stage each.

        Raises:
            NonFiniteError: the policy is "stop".
        """
        holder = "rank" if self._stages is None else "replica"
        where = "; ".join(f"{holder} {rank}: {shorten(names)}" for rank, names in sorted(names_of.items()))
        text = f"NaN or infinite gradient at step {self._step}, {where}"
        if not self._skips:
            raise NonFiniteError(
                f"gradients must be finite; got {text}. Lower the learning rate, clip the gradients, or set "
                "strategy.on_nonfinite = 'skip' to leave such updates out."
            )
        return f"skipped: {text}"

    def skipped(self) -> str | None:
        """Collective in the replica. Return the event if its gradients are not finite, so that they are left out."""
        bad = self.nonfinite()
        return self.leave_out({self._comm.rank: bad}) if bad else None

    def staleness(self, skipped: object) -> tuple[int, ...]:
        """Return the staleness of this rank's own gradient, (0,); () if it was left out, or its batch weighs 0."""
        return (0,) if not skipped and self._model.gradients.mean_weight else ()

    def take_used(self, of: slice | list[int] = slice(None)) -> Tensor:
        """Return which parameters, all or these, have had a gradient since the last call: 1, or else 0."""
        found = self.used[of].float()
        self.used[of] = False
        return found

    def step_alone(self, update: Callable[[], None]) -> Outcome:
        """Take the local optimiser's step on this rank's own gradient, left out where that is not finite."""
        used, event = self._model.gradients.collect(), self.skipped()
        if event is None:
            self.clip()
            if len(used) == len(self.used):  # else a layer was unfrozen, where nobody asks
                self.used |= used
            update()
        return Outcome(clock=self._step, staleness=self.staleness(event), event=event)


def _checksum(before: int, tensor: Tensor) -> int:
    """Continue a checksum by a tensor's bits; reads it twice where it lies, and copies no more than some sums."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    if not len(flat) or not torch.linalg.vector_norm(flat, torch.inf).item():
        return before
    share = 8 // flat.element_size()  # sums of 64-bit words are fast, and need a place where such a word may begin
    flat = flat.clone() if flat.storage_offset() % share else flat
    length = len(flat) // (share * _PIECES)
    last = length * share * _PIECES
    sums = flat[:last].view(torch.int64).view(_PIECES, length).sum(1)
    data = sums.cpu().numpy().tobytes() + tensor_bytes(flat[last:]).tobytes()
    return zlib.crc32(data, before)


def shorten(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
