"""EF-signSGD: the sign of every element times the mean magnitude, with error feedback."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import slices
from hpcdist.compress.base import Compressor
from hpcdist.compress.coding.elements import MAX_SCALE, add_signs, mean, views


@final
class EfSignSgd(Compressor):
    """Send the sign of each element as a bit, and a mean magnitude for each parameter of d elements: ±‖x‖₁/d.

    The paper feeds back steps, which include the learning rate; here gradients are fed back, which is the same while
    the rate is constant.

    Bytes for n elements: n/8, and 4 for each parameter. Error: (1 − ‖x‖₁²/(d‖x‖²))‖x‖², so that training converges with
    error feedback; with signs alone it need not.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression="ef_signsgd")

    Reference: Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian Stich, Martin Jaggi, "Error feedback fixes SignSGD
    and other gradient compression schemes", 2019, algorithm 1, by layers as in its section 6.
    """

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        message = np.empty(4 * len(self.parts) + -(-self.count // 8), np.uint8)
        scales, bits = views(message, len(self.parts))
        scales[:] = [min(mean(tensor[part]), MAX_SCALE) for part in self.parts]
        for chunk in slices(self.count):  # which starts at a whole byte
            bits[chunk.start // 8 : -(-chunk.stop // 8)] = np.packbits(tensor.numpy()[chunk] > 0)
        add_signs(bits, tensor, (-scales).tolist(), self.parts)  # leaves the error
        return torch.from_numpy(message)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        scales, bits = views(message.numpy(), len(self.parts))
        add_signs(bits, out, [weight * scale for scale in scales.tolist()], self.parts)
