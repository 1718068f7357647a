"""Several trainings with Lightning in one launch: `by_lightning.py FOLDER STRATEGY:CASE...`; prints results as JSON.

The strategy `plain` is Lightning's own: each rank trains by itself, on batches of all workers' samples.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
import hpcdist.lightning
from hpcdist.lightning import HpcdistEnvironment, HpcdistFabricStrategy, HpcdistStrategy

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
X = torch.randn(76, 5, dtype=torch.float64)
Y = X.sum(1, keepdim=True).sin()
TRAIN, VALIDATION = TensorDataset(X[:52], Y[:52]), TensorDataset(X[52:75], Y[52:75])


class Net(LightningModule):
    """Automatic optimisation, a schedule by steps, or one by epochs."""

    def __init__(self, interval="step"):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.error = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
        self.interval, self.rates = interval, []

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        found = self.net(batch[0])
        self.error(found, batch[1])
        self.log("loss", nn.functional.mse_loss(found, batch[1]), sync_dist=True)
        self.log("error", self.error)

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def on_train_epoch_end(self):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class Gan(LightningModule):
    """Manual optimisation of two models by two optimisers."""

    def __init__(self, clips=True):
        super().__init__()
        self.automatic_optimization, self.clips = False, clips
        self.generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        first, second = self.optimizers()
        x, y = batch
        self.toggle_optimizer(first)
        loss = nn.functional.softplus(-self.critic(self.generator(x))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        if self.clips:
            self.clip_gradients(first, 0.5)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        made = self.critic(self.generator(x).detach())
        loss = (nn.functional.softplus(made) + nn.functional.softplus(-self.critic(y))).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        both = self.generator, self.critic
        return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in both], []


def values(model):
    return [round(value, 13) for p in model.parameters() for value in p.detach().double().reshape(-1).tolist()]


def loaders(size, shuffle=False):
    return DataLoader(TRAIN, size, shuffle=shuffle), DataLoader(VALIDATION, size)


def fit(strategy, make=Net, *, ckpt_path=None, data=loaders, then=None, **settings):
    """A model trained by the strategy; by Lightning's own where that is None.

    `data` makes the loaders for a batch size; what `then` logs with the trainer, the model and them is added.
    """
    torch.manual_seed(1)
    model = make()
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    settings = {"precision": "64-true", "devices": 1, "max_epochs": 3, "enable_checkpointing": False} | settings
    trainer = Trainer(strategy=strategy or "auto", **quiet | settings)
    size = 4 if strategy else 8
    train, *validation = data(size)
    trainer.fit(model, train, *validation, ckpt_path=ckpt_path)
    if strategy:
        hd.finish(model)  # as loops of one's own end: it is finished
    found = {name: round(float(value), 12) for name, value in trainer.callback_metrics.items()}
    found |= then(trainer, model, *validation) if then else {}
    own = {"rates": model.rates} if isinstance(model, Net) else {}
    return {"values": values(model), "steps": trainer.global_step, "logged": found, **own}


def evaluates(strategy):
    """A validation and a prediction without training: this rank's outputs."""
    torch.manual_seed(1)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)
    trainer = Trainer(strategy=strategy or "auto", precision="64-true", **quiet)
    model, loader = Net(), DataLoader(VALIDATION, 4)
    (logged,) = trainer.validate(model, loader, verbose=False)
    outputs = [round(value, 12) for batch in trainer.predict(model, loader) for value in batch.reshape(-1).tolist()]
    return {"outputs": outputs, "logged": {name: round(value, 12) for name, value in logged.items()}}


class Stops(Callback):
    """Leaves the first training in its second epoch, after a step."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 10:
            trainer.should_stop = True


def saves(strategy, folder, *, when, until):
    """A training in two parts, and in one; the files that are saved."""
    whole = fit(strategy(), max_epochs=4)
    keeps = ModelCheckpoint(folder, save_last=True, **when)
    first = fit(strategy(), enable_checkpointing=True, callbacks=[keeps], **until)
    saved = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    kept = [round(value, 13) for each in saved.values() for value in each.reshape(-1).tolist()]
    resumed = fit(strategy(), max_epochs=4, ckpt_path=folder / "last.ckpt")
    files = sorted(path.suffix for path in folder.iterdir())
    return {**resumed, "whole": whole["values"], "consensus": kept == first["values"], "files": files}


def fabric(strategy, folder):
    """A loop of Fabric's: accumulation, clipping, an evaluation, a checkpoint."""
    torch.manual_seed(1)
    made = Fabric(accelerator="cpu", devices=1, precision="64-true", strategy=strategy or "auto")
    made.launch()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    size = 4 if strategy else 8
    loader, validation = made.setup_dataloaders(DataLoader(TRAIN, size), DataLoader(VALIDATION, size))
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader):
            adds = number % 2 == 0 and number < len(loader) - 1
            with made.no_backward_sync(model, enabled=adds):
                made.backward(nn.functional.mse_loss(model(x), y))
            if not adds:
                made.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            total = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in validation)
    total = made.all_reduce(total, reduce_op="sum")
    made.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    if strategy:
        hd.finish(net)
    saved = made.load(folder / "fabric.ckpt")["model"]
    alike = all(torch.equal(saved[name], value) for name, value in net.state_dict().items())
    return {"values": values(net), "logged": {"loss": round(float(total), 12)}, "alike": alike}


class Net32(Net):
    def training_step(self, batch, index):
        return super().training_step([each.float() for each in batch], index)

    def validation_step(self, batch, index):
        super().validation_step([each.float() for each in batch], index)


def mixed(strategy, folder):
    bf16 = fit(strategy(), Net32, precision="bf16-mixed")
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    fp16 = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    scaled = fit(strategy(), Net32, precision=None, plugins=[fp16], gradient_clip_val=1.0)
    return {"values": bf16["values"] + scaled["values"]}


class Passes(LightningModule):
    """Gathers with gradients: each rank's loss is of all ranks' outputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 1)

    def training_step(self, batch, index):
        found = self.all_gather(self.net(batch[0]), sync_grads=True).reshape(-1, 1)
        return (found**2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(strategy):
    def trained(devices):
        few = DataLoader(TRAIN, 4), DataLoader(TensorDataset(X[:1], Y[:1]), 4)
        fit(strategy(), data=lambda size: few, devices=devices)

    def stranger():
        made = Fabric(accelerator="cpu", devices=1, strategy=HpcdistFabricStrategy())
        made.launch()
        made.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))

    return {
        "portions": message(lambda: HpcdistStrategy("sandblaster")),
        "devices": message(lambda: trained(3)),
        "samples": message(lambda: trained(1)),
        "module": message(lambda: strategy().model_to_device()),
        "stranger": message(stranger),
        "name": message(lambda: hpcdist.lightning.strategy),
    }


def page(strategy, folder):
    """Runs the page's script, which lies in the folder of all cases; what it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    sys.argv[1:] = []
    with redirect_stdout(io.StringIO()) as said:
        exec(compile((folder.parents[1] / "train.py").read_text(), "train.py", "exec"), {"__name__": "page"})
    return {"said": said.getvalue()}


def environment(strategy, folder):
    made = HpcdistEnvironment()
    ranks = made.global_rank(), made.local_rank(), made.node_rank(), made.world_size()
    return {
        "ranks": ranks,
        "main": [made.main_address, made.main_port],
        "starts": not made.creates_processes_externally,
    }


CASES = {
    "epochs": lambda strategy, folder: fit(strategy(), partial(Net, "epoch")),
    "steps": lambda strategy, folder: fit(strategy()),
    "accumulation": lambda strategy, folder: fit(strategy(), accumulate_grad_batches=2),
    "clipping": lambda strategy, folder: fit(strategy(), gradient_clip_val=0.3),
    "max_steps": lambda strategy, folder: fit(strategy(), max_steps=9),
    "stops": lambda strategy, folder: fit(strategy(), callbacks=[Stops()]),
    "within": lambda strategy, folder: fit(strategy(), val_check_interval=3),
    "early": lambda strategy, folder: fit(strategy(), callbacks=[patience()]),
    "gan": lambda strategy, folder: fit(strategy(), Gan),
    "unclipped": lambda strategy, folder: fit(strategy(), partial(Gan, clips=False)),
    "shuffled": lambda strategy, folder: fit(strategy(), data=partial(loaders, shuffle=True)),
    "gathers": lambda strategy, folder: fit(strategy(), Passes),
    "resume": lambda *given: saves(*given, when={"every_n_epochs": 1}, until={"max_epochs": 2}),
    "resume_within": lambda *given: saves(*given, when={"every_n_train_steps": 5}, until={"max_steps": 10}),
    "fabric": lambda strategy, folder: fabric(strategy(HpcdistFabricStrategy), folder),
    "mixed": mixed,
    "evaluates": lambda strategy, folder: evaluates(strategy()),
    "page": page,
    "environment": environment,
}
OPTIONS = {"local_sgd": {"period": 2}, "softsync": {"splits": 1}}


def patience():
    return EarlyStopping("train_loss", min_delta=10.0, patience=1, check_on_train_epoch_end=True)


def main(folder, *given):
    hd.init(deadline_s=30)
    for each in given:
        name, case = each.split(":")

        def strategy(cls=HpcdistStrategy, name=name):
            return None if name == "plain" else cls(name, **OPTIONS.get(name, {}))

        own = Path(folder, each.replace(":", "-"), str(hd.rank()) if name == "plain" else "all")
        print(json.dumps([hd.rank(), each, CASES[case](strategy, own)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
