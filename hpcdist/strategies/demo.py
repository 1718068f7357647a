"""DeMo: momentum stays on its rank; the largest of its cosine components are sent, and leave it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig, Reduction, Span, spans
from hpcdist.compress.coding.blocks import Blocks
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Update
from hpcdist.strategies.synchronous.own_step import OwnStep, rate_of


@final
class DeMo(OwnStep):
    """Each rank sends the largest frequency components of its momentum; all step by the sign of their mean.

    Each step m ← βm + ηg on each rank, with its local gradient g. m is split into blocks, of at most `side` × `side`
    for a matrix, and T is the cosine transform of each block (DCT-II, orthonormal). q are the `keep` largest components
    of |Tm| in each block; they are subtracted from the momentum, m ← m − Tᵀq, which is also the error feedback. All
    ranks gather q; Q = Tᵀ·(the mean over the ranks that have sent a component, or over all `ranks`), and
    θ ← (1 − ηλ)θ − η·sign(Q). With `sign` = false θ ← (1 − ηλ)θ − Q, which contains η already. m is stored as Tm, which
    is equivalent: T is linear and orthonormal.

    Learning rate η and decay λ are read from each parameter's group. The optimiser must be torch's SGD without
    momentum; its step does not run. Replicas are bitwise equal. A single rank follows the same rule, not SGD.

    Bytes per rank and step: 32 of agreement, and (p − 1)·B, with B of about 5·`keep` for each block: for blocks of 64 ×
    64 and 32 components about 160 against 16,384. That is less than a ring all-reduce below about 200 ranks. Memory:
    three vectors like the parameters (m, the components, the sums). All ranks must have the same processor type: the
    last bits of a transform depend on it, and decide the sign where Q is nearly 0; replicas that diverge are detected
    and refused.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "demo", side=2, keep=1)

    Reference: Bowen Peng, Jeffrey Quesnelle, Diederik P. Kingma, "DeMo: decoupled momentum optimization", 2024; the
    rate inside the momentum and the mean over senders are as in its published code.
    """

    class Config(OwnStep.Config):
        momentum: float = Field(0.999, "β: part of the momentum that a step keeps", ge=0, le=1)
        keep: int = Field(32, "components of each block that a rank sends", ge=1)
        side: int = Field(64, "largest number of rows and of columns of a block", ge=1)
        sign: bool = Field(True, "step along the signs of what is received; false: along its values")
        combine: Literal["senders", "ranks"] = Field(
            "senders", "compute a component's mean over its senders, or over all ranks"
        )
        transform: Literal["dct", "none"] = Field("dct", "T; none sends elements of the momentum itself")
        values: Literal["fp16", "fp32", "fp64"] = Field("fp32", "type in which components are sent")

    config: Config
    contract = replace(OwnStep.contract, optimizer="SGD")
    kinds: ClassVar = (torch.optim.SGD,)
    plain: ClassVar = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
    advice: ClassVar = "torch.optim.SGD without momentum"

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        options = {"name": "chunk_topk", "keep": config.keep, "side": config.side, "values": config.values}
        compression = CompressionConfig.from_mapping({**options, "decay": config.momentum}, "strategy")
        over_senders = config.combine == "senders"
        self._sum = self.opened(Reduction(self.calls.comm, compression, model.params, spans(model), over_senders))
        self.state.reduction("sent", self._sum)
        self._components = self.state.scratch([torch.zeros_like(grad) for grad in model.grads])

    def move(self, update: Update) -> None:
        """Add T(ηg) to Tm, the residual of `_sum`; gather its largest components; step by their inverse transform."""
        stepped = {item.name for item in self.trained()}
        for slot in self.model.slots:
            if slot.name not in stepped:
                slot.view(self._components).zero_()
        for item in self.trained(self.model.grads, self._components):
            for gradient, components in self._blocks(*item.views):
                torch.mul(self._transform(gradient), rate_of(item.group), out=components)
        divisor = self._sum(self._components, self.model.gradients.present())
        for item in self.trained(self._components):
            rate, decay = rate_of(item.group), item.group["weight_decay"]
            for components, parameter in self._blocks(*item.views, item.parameter.detach()):
                step = self._transform(components, back=True)
                if decay:
                    parameter.mul_(1 - rate * decay)
                if self.config.sign:
                    parameter.sub_(step.sign(), alpha=rate)
                else:
                    parameter.sub_(step, alpha=1 / divisor)

    def _blocks(self, *parameters: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield matching rows of blocks of tensors of one shape, as `transform` takes them; see `Blocks.chunks`."""
        blocks = Blocks.of(Span(0, parameters[0].numel(), parameters[0].shape), self.config.side)
        return blocks.chunks(*(each.view(-1) for each in parameters))

    def _transform(self, blocks: Tensor, *, back: bool = False) -> Tensor:
        return blocks if self.config.transform == "none" else transform(blocks, back=back)


def transform(blocks: Tensor, *, back: bool = False) -> Tensor:
    """Compute the cosine components of blocks, or with `back` the blocks that have these components.

    Args:
        blocks: shape (down, height, across, width); half precision is transformed in float32.
    """
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    down, along = (cosines(blocks.shape[axis], wide.dtype, wide.device) for axis in (1, 3))
    if back:
        down, along = down.T, along.T
    return (down @ (wide @ along.T).flatten(2)).view_as(wide)


@cache
def cosines(n: int, dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> Tensor:
    """Return the matrix of the orthonormal cosine transform (DCT-II) of n values, shape (n, n)."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = (math.pi / n * (i + 0.5) * k).cos() * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device, dtype)
