"""What scripts for Lightning do, beyond by_lightning.py; used like that."""

from __future__ import annotations

import sys
from functools import partial

import torch
import torchmetrics
from by_lightning import CASES, TRAIN, VALIDATION, Net, fit, loaders, main, message, refusals, values
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import hpcdist as hd
from hpcdist.lightning import HpcdistFabricStrategy

QUIET = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)


# --- models -----------------------------------------------------------------------------------------------------------
class Tested(Net):
    def test_step(self, batch, index):
        self.log("tested", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class Measured(Net):
    """Logs in each step, and by metrics in training."""

    def __init__(self):
        super().__init__()
        self.squared = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.both = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()])
        self.both.set_dtype(torch.float64)
        # Of 8 samples, the first batch of one process, the first choice misses one: they are equal on one of two ranks.
        choices = {f"top{k}": torchmetrics.classification.MulticlassAccuracy(3, k) for k in (1, 2)}
        self.choices = torchmetrics.MetricCollection(choices)

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        loss = nn.functional.mse_loss(found, batch[1])
        self.squared(found.detach(), batch[1])
        self.both.update(found.detach(), batch[1])
        self.log("squared", self.squared, on_epoch=True, on_step=False)
        missed = (batch[0][:, 0] >= TRAIN.tensors[0][:8, 0].max()).long()
        self.choices.update(torch.tensor([2.0, 1.0, 0.0]).expand(len(missed), 3), missed)
        self.log_dict(self.both, on_epoch=True, on_step=False)
        self.log_dict(self.choices, on_epoch=True, on_step=False)
        self.log("of_step", loss.detach(), prog_bar=True, sync_dist=True)
        over_epochs = {"on_epoch": True, "on_step": False, "sync_dist": True}
        self.log("sized", loss.detach(), batch_size=len(batch[0]), **over_epochs)
        self.log("samples", torch.tensor(float(len(batch[0]))), reduce_fx="sum", **over_epochs)
        return loss


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Plain(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Fine(Plain):
    def __init__(self):
        super().__init__()
        self.backbone = self.net[0]


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


class OneCycle(Net):
    """Asks for the number of steps before there is an optimiser."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Two(Net):
    def training_step(self, batch, batch_idx):
        parts = batch.values() if isinstance(batch, dict) else batch
        return sum(nn.functional.mse_loss(self.net(part[0]), part[1]) for part in parts if part is not None)


class TwoValidations(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


# --- data -------------------------------------------------------------------------------------------------------------
class Data(LightningDataModule):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return loaders(self.size)[0]

    def val_dataloader(self):
        return loaders(self.size)[1]


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from self.data


class Backwards(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self)))


class Batches(list):
    """Any iterable of batches."""


def first(count, size, **settings):
    return DataLoader(TensorDataset(*TRAIN[:count]), size, **settings)


def two(size, *, counts=(32, 52), mode=None, drop_last=True):
    both = {name: first(count, size, drop_last=drop_last) for name, count in zip("ab", counts, strict=True)}
    return CombinedLoader(both, mode) if mode else both, loaders(size)[1]


def drawn(size, **settings):
    return DataLoader(TRAIN, **settings), loaders(size)[1]


def batched(size):
    return DataLoader(TRAIN, batch_sampler=BatchSampler(Backwards(TRAIN), size, False))


# --- runs -------------------------------------------------------------------------------------------------------------
def best(strategy, folder):
    keeps = ModelCheckpoint(folder, monitor="loss", save_top_k=2)

    def then(trainer, model, validation):
        (tested,) = trainer.test(model, validation, ckpt_path="best", verbose=False)
        return {**tested, "score": float(keeps.best_model_score), "kept": float(len(keeps.best_k_models))}

    return fit(strategy, Tested, callbacks=[keeps], enable_checkpointing=True, max_epochs=5, then=then)


def monitored(strategy, folder):
    return fit(strategy, callbacks=[LearningRateMonitor("step")], logger=CSVLogger(folder), log_every_n_steps=1)


def twice(trainer, model, validation):
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, loaders(validation.batch_size)[0], validation)
    return {"epoch": float(trainer.current_epoch)}


def evaluates(strategy, folder):
    torch.manual_seed(1)
    model, loader = Tested(), DataLoader(VALIDATION, 4)
    trainer = Trainer(strategy=strategy or "auto", precision="64-true", **QUIET)
    (tested,), (validated,) = (run(model, loader, verbose=False) for run in (trainer.test, trainer.validate))
    return {"values": values(model), "logged": tested | validated}


class Writes(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.found = {}

    def write_on_batch_end(self, trainer, module, prediction, indices, *_):
        self.found |= zip(indices, prediction.reshape(-1).tolist(), strict=True)


def predicts(strategy, folder):
    torch.manual_seed(1)
    writes = Writes()
    trainer = Trainer(strategy=strategy or "auto", precision="64-true", callbacks=[writes], **QUIET)
    trainer.predict(Net(), DataLoader(VALIDATION, 4), return_predictions=False)
    found = {index: value for (each,) in hd.allgather((writes.found,)) for index, value in each.items()}
    return {"values": [found[index] for index in sorted(found)], "steps": len(found)}


def fabric(strategy, folder, make):
    torch.manual_seed(1)
    made = Fabric(accelerator="cpu", devices=1, precision="64-true", strategy=strategy or "auto")
    made.launch()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader = made.setup_dataloaders(make(4 if strategy else 8))
    state, steps = {"model": model, "optimizer": optimizer, "steps": 0}, 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            made.backward(nn.functional.mse_loss(model(x), y))
            made.clip_gradients(model, optimizer, clip_val=0.2)
            optimizer.step()
            steps += 1
        made.save(folder / "fabric.ckpt", state | {"steps": steps})
        made.load(folder / "fabric.ckpt", state)
    found = {"values": values(net), "steps": state["steps"]}
    if strategy:
        hd.finish(net)
    return found


def refused(strategy, folder):
    def trained(train, make=Net):
        return message(lambda: fit(strategy(), make, data=lambda size: (train(size),)))

    uneven = Batches(TRAIN[4 * i : 4 * i + 4] for i in range(2 + hd.rank()))
    return refusals(strategy) | {
        "stream": trained(lambda size: hd.shard(DataLoader(Stream(TRAIN), size))),
        "uneven": trained(lambda size: hd.shard(uneven, split=False)),
        "weights": trained(lambda size: two(size, drop_last=False)[0], Two),
        "left": trained(lambda size: DataLoader(TRAIN, size)),
    }


def pattern(make=Net, **settings):
    return lambda strategy, folder: fit(strategy(), make, **settings)


def on_fabric(make):
    return lambda strategy, folder: fabric(strategy(HpcdistFabricStrategy), _made(folder), make)


def _made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


CASES.update(
    by_value=pattern(gradient_clip_val=0.05, gradient_clip_algorithm="value"),
    scheduler=lambda strategy, folder: fit(strategy(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})]),
    limit=pattern(limit_train_batches=3),
    overfit=pattern(overfit_batches=2),
    across=pattern(val_check_interval=5, check_val_every_n_epoch=None),
    max_time=pattern(max_time="00:00:10:00"),
    stopped=lambda strategy, folder: fit(
        strategy(), callbacks=[EarlyStopping("loss", min_delta=0.05, patience=1)], max_epochs=20
    ),
    best=lambda strategy, folder: best(strategy(), folder),
    swa=lambda strategy, folder: fit(
        strategy(), Plain, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=2)], max_epochs=5
    ),
    monitored=lambda strategy, folder: monitored(strategy(), folder),
    plateau=pattern(Plateau, max_epochs=6),
    one_cycle=pattern(OneCycle, accumulate_grad_batches=2),
    lbfgs=pattern(Lbfgs, max_epochs=1),  # its steps enlarge differences of rounding
    synced=lambda strategy, folder: fit(made := strategy(), Normed, sync_batchnorm=made is not None),
    min_size=pattern(Two, data=partial(two, mode="min_size")),
    max_size=pattern(Two, data=partial(two, mode="max_size")),
    cycled=pattern(Two, data=two),
    longest=pattern(Two, data=partial(two, counts=(52, 32)), val_check_interval=2),
    validations=pattern(TwoValidations, data=lambda size: (loaders(size)[0], [loaders(size)[1], first(20, size)])),
    tested=lambda strategy, folder: evaluates(strategy(), folder),
    predicted=lambda strategy, folder: predicts(strategy(), folder),
    measured=pattern(Measured),
    sampler=pattern(data=lambda size: drawn(size, batch_size=size, sampler=Backwards(TRAIN), drop_last=True)),
    batch_sampler=pattern(data=lambda size: (batched(size), loaders(size)[1])),
    processes=pattern(data=lambda size: drawn(size, batch_size=size, num_workers=1), max_epochs=1),
    module=pattern(data=lambda size: (Data(size),)),
    reloaded=pattern(reload_dataloaders_every_n_epochs=1),
    twice=pattern(then=twice),
    unfrozen=lambda strategy, folder: fit(strategy(), Fine, callbacks=[BackboneFinetuning(2)], max_epochs=4),
    streamed=pattern(data=lambda size: (loaders(size)[0], DataLoader(Stream(VALIDATION), size))),
    fabric_drops=on_fabric(partial(first, 52, drop_last=True)),
    fabric_batches=on_fabric(batched),
    fabric_streams=on_fabric(lambda size: DataLoader(Stream(TRAIN), size)),
    refused=refused,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
