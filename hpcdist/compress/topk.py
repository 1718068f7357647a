"""Top-k: the largest elements in magnitude are sent as they are, the others wait."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.compress.coding.largest import Largest


@final
class Topk(Largest):
    """Send the k elements of largest magnitude of d, k = ratio · d rounded to nearest and at least 1.

    Bytes: 4 + k(v + H/8), v being 2, 4 or 8 by `values`, and H the entropy of a gap in bits, about log₂(d/k) + 1.44;
    none if all elements are zero. Error: ‖x − message‖² ≤ (1 − k/d)‖x‖², a contraction, up to the rounding of values.

    Reference: Alham Fikri Aji, Kenneth Heafield, "Sparse communication for distributed gradient descent", 2017;
    Sebastian Stich, Jean-Baptiste Cordonnier, Martin Jaggi, "Sparsified SGD with memory", 2018, definition 2.1; Dan
    Alistarh and others, "The convergence of sparsified gradient methods", 2018.
    """

    def take(self, tensor: Tensor) -> Tensor:
        return self._take(tensor.numpy(), self.config.ratio)[0]
