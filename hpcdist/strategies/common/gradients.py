"""Clip a rank's gradients, and skip updates with gradients that are not finite."""

from __future__ import annotations

import cmath
import functools
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.model.buckets import Bucket
from hpcdist.model.flat import FlatModel
from hpcdist.parallel.agreement import Agreement
from hpcdist.records.digest import tensor_bytes
from hpcdist.strategies.common.records import Outcome

FIRST_STEPS = 2  # number of steps whose gradients are compared among ranks
_SHORT = 1 << 12  # elements of a gradient that is summed together with others
_CHUNKS = 256  # of a tensor, with a sum each, so that the checksum depends on the elements' order


class LocalGradients:
    """Checks and clips the gradients of this rank's model in the current step; skips updates that are not finite.

    A step calls `start`, then `nonfinite` or `skipped`, `clip`, and `done`. `model.slots` lists the trainable
    parameters (`slot.tensor`) with their positions in flat memory.

    Attributes:
        checksums: checksums of this rank's gradients before averaging, one for each of the first steps; 0 for zero
            gradients. None: not computed.
        changed: the loop has changed gradients in this step since the backward pass, except by unscaling the loss.
        ignores_nonfinite: the update is applied even if gradients are not finite.
        used: which parameters have had a gradient in a local update since `take_used`; bool, shape (parameters,).

    Args:
        policy: `on_nonfinite` of the strategy's options: stop, skip or ignore.
        clip_norm: largest 2-norm of the whole gradient; None: no clipping.
        stages: collective calls among the ranks that hold the pipeline stages of one replica, see
            `hpcdist.parallel.agreement.Agreement`; None where this rank has the whole model.
    """

    def __init__(
        self, comm: Communicator, model: FlatModel, policy: str, clip_norm: float | None, stages: Agreement | None
    ):
        self.clip_norm, self.policy = clip_norm, policy
        self._comm, self._model, self._stages = comm, model, stages
        self.checksums: list[int] | None = None
        self.used = torch.zeros(len(model.slots), dtype=torch.bool)
        self._step_checksums: list[int] = []  # checksums of this step's gradients, perhaps bucket by bucket
        self.start(1, False, changed=False)  # last: it reads the attributes above

    def start(self, step: int, skips: bool, *, changed: bool) -> None:
        """Start step number `step`; with `skips` a non-finite gradient skips its update, whatever the policy is."""
        self._step, self._skips, self.changed = step, skips or self.policy == "skip", changed
        self.ignores_nonfinite = self.policy == "ignore" and not skips
        if self.checksums is not None and len(self.checksums) < FIRST_STEPS and not self._step_checksums:
            own = [slot.tensor.grad for slot in self._model.slots]  # `advance` may average them in place
            dense = [grad for grad in own if grad is not None and grad.layout == torch.strided]
            self._step_checksums.append(functools.reduce(_checksum, dense, 0))

    def nonfinite(self, bucket: Bucket | None = None, *, again: bool = False) -> list[str]:
        """Return the names of the parameters whose gradient contains NaN or infinity; empty if these are ignored.

        Collective over the stages of the replica, unless `bucket` or `again` is given. Reads the gradients once: NaN
        and infinity survive in a sum. Only if the sum is not finite (it may also overflow), each gradient is checked.
        Waits for the device. Without `again` it also takes the checksums of the first steps.

        Args:
            bucket: check only this bucket's gradients, on this rank.
            again: check this rank's gradients after they were sent; no checksum is taken.
        """
        flats = self._model.grads if bucket is None else [bucket.grads]
        tensors = flats or [slot.tensor.grad for slot in self._model.slots if slot.tensor.grad is not None]
        if not again and self.checksums is not None and len(self.checksums) < FIRST_STEPS:
            self._step_checksums.append(functools.reduce(_checksum, tensors, 0))
        if self.ignores_nonfinite:
            return []
        joins = len(self._model.params) == 1  # one dtype and device
        names: list[str] = []
        if not all(cmath.isfinite(total.item()) for total in _sums(tensors, joins)):
            named = [(s.name, s.tensor.grad) for s in self._model.slots if bucket is None or s.name in bucket.params]
            names = [name for name, grad in named if grad is not None and not torch.isfinite(grad).all()]
        if self._stages is None or again or bucket is not None:
            return names
        return self._stages.nonfinite({0: names} if names else {}).get(0, [])  # of this replica; any key will do

    def done(self) -> None:
        """End the step: append its checksum to `checksums` if it is one of the first steps."""
        if self.checksums is not None and len(self.checksums) < FIRST_STEPS:
            self.checksums.append(hash(tuple(self._step_checksums)) if any(self._step_checksums) else 0)
        self._step_checksums, self.ignores_nonfinite = [], self.policy == "ignore"

    def clip(self, weight: float = 1.0) -> None:
        """Collective over the stages of the replica. Clip the whole gradient to the norm `clip_norm`.

        Args:
            weight: factor that the gradients were multiplied by; the norm is multiplied by it too.
        """
        if self.clip_norm is None:
            return
        parameters, largest = [slot.tensor for slot in self._model.slots], self.clip_norm * weight
        if self._stages is None:
            nn.utils.clip_grad_norm_(parameters, largest)
        else:
            self._stages.clip(parameters, largest)

    def skip_update(self, names_of: dict[int, list[str]]) -> str:
        """Return the event that records a skipped update, with the parameters whose gradient is not finite.

        Args:
            names_of: parameter names by rank, or by replica where its ranks hold a stage each.

        Raises:
            NonFiniteError: the policy is "stop".
        """
        holder = "rank" if self._stages is None else "replica"
        where = "; ".join(f"{holder} {rank}: {shorten(names)}" for rank, names in sorted(names_of.items()))
        text = f"NaN or infinite gradient at step {self._step}, {where}"
        if not self._skips:
            raise NonFiniteError(
                f"gradients must be finite; got {text}. Lower the learning rate, clip the gradients, or set "
                "strategy.on_nonfinite = 'skip' to skip such updates."
            )
        return f"skipped: {text}"

    def skipped(self) -> str | None:
        """Collective over the stages. Return the event of a skipped update if a gradient is not finite, else None."""
        bad = self.nonfinite()
        return self.skip_update({self._comm.rank: bad}) if bad else None

    def staleness(self, skipped: object) -> tuple[int, ...]:
        """Return `Outcome.staleness`: (0,) for this rank's gradient; () if it was skipped or its batch has weight 0."""
        return (0,) if not skipped and self._model.gradients.mean_weight else ()

    def take_used(self, of: slice | list[int] = slice(None)) -> Tensor:
        """Return 1.0 for each parameter in `of` with a gradient since the last call, else 0.0; reset the flags."""
        used = self.used[of].float()
        self.used[of] = False
        return used

    def step_alone(self, update: Callable[[], None]) -> Outcome:
        """Clip this rank's gradient and run the local optimiser on it; skip the update if it is not finite."""
        used, event = self._model.gradients.collect(), self.skipped()
        if event is None:
            self.clip()
            if len(used) == len(self.used):  # else a layer was unfrozen, in strategies that do not read `used`
                self.used |= used
            update()
        return Outcome(clock=self._step, staleness=self.staleness(event), event=event)


def _sums(tensors: Sequence[Tensor], joins: bool) -> list[Tensor]:
    """Return sums of which one is not finite if an element is not; with `joins` one of all short tensors."""
    short, sums = [], []
    for tensor in tensors:
        if joins and tensor.numel() <= _SHORT:
            short.append(tensor)
        else:
            sums.append(tensor.sum())
    if short:
        sums.append(_flatten_dense_tensors(short).sum())
    if len(sums) > 1 and not sums[0].is_cpu and len({total.device for total in sums}) == 1:
        sums = list(torch.stack(sums).cpu())  # one wait for the device
    return sums


def _checksum(before: int, tensor: Tensor) -> int:
    """Return the checksum `before` extended by a tensor's bits; unchanged by zeros. Copies only sums to the host."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    if not len(flat) or not torch.linalg.vector_norm(flat, torch.inf).item():
        return before
    per_int64 = 8 // flat.element_size()  # sums of int64 are fast, and need memory aligned to 8 bytes
    flat = flat.clone() if flat.storage_offset() % per_int64 else flat
    per_chunk = len(flat) // (per_int64 * _CHUNKS)
    end = per_chunk * per_int64 * _CHUNKS
    sums = flat[:end].view(torch.int64).view(_CHUNKS, per_chunk).sum(1)
    data = sums.cpu().numpy().tobytes() + tensor_bytes(flat[end:]).tobytes()
    return zlib.crc32(data, before)


def shorten(names: list[str], limit: int = 3) -> str:
    """Join the first names for a message: "a, b, c and 2 more"."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
