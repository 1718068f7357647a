"""DeMo: momentum stays on its rank; the largest of its cosine components are sent, and leave it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.comm.chunks import CACHED
from hpcdist.compress import CompressionConfig, Reduction, Span, spans
from hpcdist.compress.coding.blocks import Blocks
from hpcdist.strategies.synchronous.own_step import OwnStep, rate_of


@final
class DeMo(OwnStep):
    """Let each rank send the fast components of a momentum of its own, and step along the sign of what all have sent.

    Each step m ← βm + ηg on each rank, with its own gradient g. m is cut into blocks, each matrix in blocks of at most
    `side` × `side`, and T is the cosine transform of each block (DCT-II, orthonormal). q are the `keep` largest of |Tm|
    in each block; they leave the momentum, m ← m − Tᵀq, so momentum and what waits to be sent are one. All ranks gather
    q; Q = Tᵀ·(the mean over the ranks that have sent a component, or over all `ranks`), θ ← (1 − ηλ)θ − η·sign(Q). A
    rank with fewer than `keep` components in a block that are not 0 has sent all of the block.
    With `sign` = false θ ← (1 − ηλ)θ − Q, in which the rate is already. m is kept as Tm, which is the same: T is linear
    and orthonormal.

    The rate η and the decay λ are those of each parameter's group. The optimiser must be torch's SGD without momentum,
    which this rule has itself; its own step is not run. Replicas are bitwise equal. On one rank it is this rule too,
    and not SGD.

    Bytes per rank and step: 32 of agreement, and (p − 1)·B, with B of about 5·`keep` for each block: for blocks of 64 ×
    64 and 32 components about 160 against 16,384. That is less than a ring all-reduce below about 200 ranks. Memory:
    three vectors like the parameters (m, what is sent, the sums). The ranks' processors must be of one kind: the last
    bits of a transform are a processor's own, and where Q is nearly 0 they decide its sign; replicas that part are
    found out and refused.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "demo", side=2, keep=1)

    Reference: Bowen Peng, Jeffrey Quesnelle, Diederik P. Kingma, "DeMo: decoupled momentum optimization", 2024; the
    rate inside the momentum and the mean over senders are as in its published code.
    """

    class Config(OwnStep.Config):
        """Options of demo."""

        momentum: float = Field(0.999, ge=0, le=1, description="β: part of the momentum that a step keeps")
        keep: int = Field(32, ge=1, description="components of each block that a rank sends")
        side: int = Field(64, ge=1, description="most rows and most columns of a block")
        sign: bool = Field(True, description="step along the signs of what is received; false: along its values")
        combine: Literal["senders", "ranks"] = Field(
            "senders", description="a component's mean is over the ranks that have sent it, or over all"
        )
        transform: Literal["dct", "none"] = Field("dct", description="T; none sends elements of the momentum itself")
        values: Literal["fp16", "fp32", "fp64"] = Field("fp32", description="type in which components are sent")

    config: Config
    contract = replace(OwnStep.contract, optimizer="SGD")
    kinds: ClassVar = (torch.optim.SGD,)
    plain: ClassVar = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
    advice: ClassVar = "torch.optim.SGD without momentum"

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        sent = {"name": "chunk_topk", "keep": config.keep, "side": config.side, "values": config.values}
        chosen = CompressionConfig.from_mapping({**sent, "decay": config.momentum}, "strategy")
        self._sum = Reduction(
            self.calls.comm, chosen, model.params, spans(model), over_senders=config.combine == "senders"
        )
        self.state.reduction("sent", self._sum)
        self._components = self.state.scratch([torch.zeros_like(grad) for grad in model.grads])

    def move(self, update) -> None:
        stepped = {one.name for one in self.trained()}
        for slot in self.model.slots:
            if slot.name not in stepped:
                slot.view(self._components).zero_()
        for one in self.trained(self.model.grads, self._components):
            for gradient, components in self._blocks(*one.views):
                torch.mul(self._transform(gradient), rate_of(one.group), out=components)
        ranks = self._sum(self._components, self.model.gradients.present())
        for one in self.trained(self._components):
            rate, decay = rate_of(one.group), one.group["weight_decay"]
            for components, parameter in self._blocks(*one.views, one.parameter.detach()):
                step = self._transform(components, back=True)
                if decay:
                    parameter.mul_(1 - rate * decay)
                if self.config.sign:
                    parameter.sub_(step.sign(), alpha=rate)
                else:
                    parameter.sub_(step, alpha=1 / ranks)

    def _blocks(self, *parameters: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield matching rows of blocks of a parameter and what is like it, so few on the host that caches hold them.

        Their shape is (down, height, across, width).
        """
        blocks = Blocks.of(Span(0, parameters[0].numel(), parameters[0].shape), self.config.side)
        some = max(1, CACHED // max(1, blocks.height * blocks.columns)) if parameters[0].is_cpu else blocks.rows
        return zip(*(blocks.view(each.view(-1)).split(some) for each in parameters), strict=True)

    def _transform(self, blocks: Tensor, *, back: bool = False) -> Tensor:
        return blocks if self.config.transform == "none" else transform(blocks, back=back)

    def close(self) -> None:
        self._sum.close()
        super().close()


def transform(blocks: Tensor, *, back: bool = False) -> Tensor:
    """Compute the cosine components of blocks, or with `back` the blocks that have these components.

    Args:
        blocks: shape (down, height, across, width); of half precision they are transformed in float32.
    """
    height, width = blocks.shape[1], blocks.shape[3]
    wide = blocks.to(torch.float64 if blocks.dtype == torch.float64 else torch.float32)
    down, along = (cosines(n).to(wide) for n in (height, width))
    if back:
        down, along = down.T, along.T
    return (down @ (wide @ along.T).flatten(2)).view_as(wide)


@cache
def cosines(n: int) -> Tensor:
    """Return the matrix of the orthonormal cosine transform (DCT-II) of n values, shape (n, n), float64."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = (math.pi / n * (i + 0.5) * k).cos() * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix
