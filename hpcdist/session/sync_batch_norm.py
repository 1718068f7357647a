"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.model.gradients import Gradients
from hpcdist.session import rules
from hpcdist.strategies import Strategy


class _Ranks:
    """The ranks that a layer normalises over. Copies of the layer share it; a pickled layer loses it."""

    def __init__(
        self, comm: Communicator | None = None, gradients: Gradients | None = None, weights_batches: bool = False
    ):
        self.comm, self.gradients, self.weights_batches = comm, gradients, weights_batches

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ranks, ()


class SyncBatchNorm(nn.SyncBatchNorm):
    """Normalise by the mean and variance of the batches of all ranks, on CPUs and GPUs.

    `hpcdist.DistributedOptimizer` replaces torch's `nn.SyncBatchNorm` layers by these, because torch's need
    torch.distributed and GPUs. So write `nn.SyncBatchNorm`, or convert a model by
    `nn.SyncBatchNorm.convert_sync_batchnorm(model)`. In training, forward and backward passes are collective; a batch
    of weight 0 is ignored. In evaluation this is ordinary batch normalisation.

    Messages: an all-reduce of 2 numbers per channel in the forward pass, and again in the backward pass.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.SyncBatchNorm(2))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hd.DistributedOptimizer(sgd, model)
        >>> isinstance(model[1], hd.SyncBatchNorm)
        True

    Reference: Sergey Ioffe, Christian Szegedy, "Batch normalization: accelerating deep network training by reducing
    internal covariate shift", 2015; over ranks, Chao Peng et al., "MegDet: a large mini-batch object detector", 2018.
    """

    ranks: _Ranks = _Ranks()  # set by DistributedOptimizer

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        comm, gradients = self.ranks.comm, self.ranks.gradients
        if not uses_batch or comm is None or gradients is None or comm.size == 1:
            return _BatchNorm.forward(self, input)
        weight = gradients.weight if self.ranks.weights_batches else float(gradients.weight > 0)
        options = self.weight, self.bias, self.eps, weight, comm
        output, mean, variance, count = _Normalise.apply(input, *options)  # type: ignore[no-untyped-call]
        if self.training and self.running_mean is not None:
            self._track(mean, variance, float(count))
        return output

    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance."""
        layer: Any = self  # its statistics are tensors here
        layer.num_batches_tracked.add_(1)
        factor = 1.0 / float(layer.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            layer.running_mean.lerp_(mean.to(layer.running_mean), factor)
            layer.running_var.lerp_((variance * (count / max(1.0, count - 1.0))).to(layer.running_var), factor)


class _Normalise(torch.autograd.Function):
    """Normalise by the mean and (biased) variance per channel of all ranks' inputs; sums are taken in float64."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, weight: float, comm: Communicator
    ) -> Any:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        x64 = x.double()
        count = float(x.numel() // x.shape[1])
        local = torch.cat([x64.sum(axes), x64.square().sum(axes), x64.new_tensor([count])])
        sums = local if weight else torch.zeros_like(local)
        comm.allreduce(sums)
        total = sums[-1].clamp(min=1.0)
        mean, mean_square = (sums[:-1] / total).chunk(2)
        variance = (mean_square - mean.square()).clamp(min=0.0)
        inverse = (variance + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        normalised = ((x64 - mean.view(shape)) * inverse.view(shape)).to(x.dtype)
        ctx.save_for_backward(normalised, scale, inverse, total)
        ctx.axes, ctx.shape, ctx.weight, ctx.comm, ctx.shifts = axes, shape, weight, comm, shift is not None
        output = normalised if scale is None else normalised * scale.view(shape).to(x.dtype)
        output = output if shift is None else output + shift.view(shape).to(x.dtype)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.clone() if output is normalised else output, mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        normalised, scale, inverse, total = ctx.saved_tensors
        axes, shape, weight = ctx.axes, ctx.shape, ctx.weight
        grad64, hat = grad.double(), normalised.double()
        grad_sum, product_sum = grad64.sum(axes), (grad64 * hat).sum(axes)
        # Parameters multiply their gradients by the rank's weight; weight the sums over ranks here accordingly.
        local = torch.cat([grad_sum, product_sum])
        sums = local * weight if weight else torch.zeros_like(local)
        ctx.comm.allreduce(sums)
        mean_grad, mean_product = (sums / (total * (weight or 1.0))).chunk(2)
        factor = inverse if scale is None else inverse * scale.double()
        centred = grad64 - mean_grad.view(shape) - hat * mean_product.view(shape)
        grad_x = (centred * factor.view(shape)).to(grad.dtype) if weight else torch.zeros_like(grad)
        grad_scale = None if scale is None else product_sum.to(scale.dtype)
        grad_shift = grad_sum.to(scale.dtype if scale is not None else grad.dtype) if ctx.shifts else None
        return grad_x, grad_scale, grad_shift, None, None, None


def synchronise_batch_norms(
    flat: FlatModel, strategy: type[Strategy], workers: Communicator, *, weights_batches: bool
) -> None:
    """Replace torch's SyncBatchNorm layers by `SyncBatchNorm` over the workers.

    Args:
        weights_batches: the strategy multiplies gradients by the batch's weight.

    Raises:
        ConfigError: the strategy is not synchronous.
    """
    layers = [(name, layer) for name, layer in flat.module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if not layers:
        return
    rules.refuse("the model has SyncBatchNorm", strategy, name=layers[0][0])
    for _, layer in layers:
        layer.__class__ = SyncBatchNorm
        layer.ranks = _Ranks(workers, flat.gradients, weights_batches)  # type: ignore[assignment]
