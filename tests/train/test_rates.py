"""Learning rates of whole runs, held against direct formulas: every schedule of torch, scaling, warm-up."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from harness.cases import each
from hpcdist import checkpoint
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.optimizer import rescale
from hpcdist.train import runs
from train import tiny

EPOCHS = 3
PLAIN = ("optimizer=SGD", "optimizer.lr=0.1", f"epochs={EPOCHS}")
LARGE = ("optimizer.momentum=0.5", "batch_size=32")  # 359 samples, 2 x 32 a step: 6 steps an epoch


def _rates(folder: Path, ranks: int, *overrides: str, resume: Path | None = None) -> list[float]:
    """The rate of each update of rank 0, and of all others that make updates."""

    def body(comm):
        with tiny.training(comm, folder, "schedule=none", *PLAIN, *overrides) as trainer:
            seen = []
            trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
            trainer.run(resume)
            return seen

    found = run_virtual(body, ranks)
    assert all(rates in (found[0], []) for rates in found)
    return found[0]


def _constant(rates: list[float]) -> float:
    (rate,) = set(rates)
    return rate


def _torchs(make, updates: int, per: int) -> list[float]:
    """The same from torch alone, with a step of the schedule after every `per` updates."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.5)
    schedule, rates = make(optimizer), []
    optimizer.step()
    for update in range(1, updates + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        if update % per == 0:
            schedule.step()
    return rates


S = torch.optim.lr_scheduler
SCHEDULES = {
    "StepLR": ({"step_size": 2, "gamma": 0.5}, lambda o: S.StepLR(o, 2, 0.5)),
    "MultiStepLR": ({"milestones": [1, 5]}, lambda o: S.MultiStepLR(o, [1, 5])),
    "ConstantLR": ({"total_iters": 2}, lambda o: S.ConstantLR(o, total_iters=2)),
    "LinearLR": ({"total_iters": 4}, lambda o: S.LinearLR(o, total_iters=4)),
    "ExponentialLR": ({"gamma": 0.9}, lambda o: S.ExponentialLR(o, 0.9)),
    "PolynomialLR": ({"total_iters": 9}, lambda o: S.PolynomialLR(o, 9)),
    "CosineAnnealingLR": ({"T_max": 9}, lambda o: S.CosineAnnealingLR(o, 9)),
    "CosineAnnealingWarmRestarts": ({"T_0": 2}, lambda o: S.CosineAnnealingWarmRestarts(o, 2)),
    "CyclicLR": ({"base_lr": 0.1, "max_lr": 0.2, "step_size_up": 3}, lambda o: S.CyclicLR(o, 0.1, 0.2, step_size_up=3)),
    "OneCycleLR": ({"max_lr": 0.3, "total_steps": 90}, lambda o: S.OneCycleLR(o, 0.3, 90)),
    "LambdaLR": ({"lr_lambda": f'"{__file__}:halves"'}, lambda o: S.LambdaLR(o, halves)),
    "MultiplicativeLR": ({"lr_lambda": f'"{__file__}:halves"'}, lambda o: S.MultiplicativeLR(o, halves)),
    "SequentialLR": (
        {"milestones": [2], "schedules": '[{name="LinearLR", total_iters=2}, {name="ExponentialLR", gamma=0.9}]'},
        lambda o: S.SequentialLR(o, [S.LinearLR(o, total_iters=2), S.ExponentialLR(o, 0.9)], [2]),
    ),
    "ChainedScheduler": (
        {"schedules": '[{name="ConstantLR", total_iters=2}, {name="ExponentialLR", gamma=0.9}]'},
        lambda o: S.ChainedScheduler([S.ConstantLR(o, total_iters=2), S.ExponentialLR(o, 0.9)]),
    ),
}


def halves(step: int) -> float:
    return 1 / (1 + step)


def _flags(name: str, options: dict) -> list[str]:
    return [f"schedule={name}", *(f"schedule.{key}={value}" for key, value in options.items())]


@pytest.mark.parametrize("name", [*SCHEDULES, "warm-up"])
def test_every_schedule_follows_torchs_also_in_a_run_that_goes_on(tmp_path, name):
    options = ["schedule.warmup_steps=10"] if name == "warm-up" else _flags(name, SCHEDULES[name][0])
    options += [*LARGE, "schedule.per=step", "checkpoint.every_steps=8", "epochs=2", "eval_every=2"]
    whole = _rates(tmp_path, 2, *options)
    assert len(whole) == 2 * 6 and len(set(whole)) > 1
    if name != "warm-up":
        assert whole == pytest.approx(_torchs(SCHEDULES[name][1], len(whole), 1), abs=1e-12)
    path = tmp_path / "run" / "checkpoints" / "step-00000008"
    assert _rates(tmp_path, 2, *options, resume=path) == whole[8:]


@each("name", ["StepLR", "SequentialLR"])
def test_a_schedule_may_have_a_step_after_each_epoch(tmp_path, name):
    options, make = SCHEDULES[name]
    found = _rates(tmp_path, 2, *LARGE, *_flags(name, options), "schedule.per=epoch")
    assert found == pytest.approx(_torchs(make, EPOCHS * 6, 6), abs=1e-12) and len(set(found)) > 1


@pytest.mark.parametrize(
    ("size", "flags", "expected"),
    [
        # Three workers with 16 samples each, against a reference of 8; a server is no worker.
        (3, [], 0.1),
        (3, ["optimizer.scale=linear", "optimizer.reference_batch=8"], 0.6),
        (3, ["optimizer.scale=sqrt", "optimizer.reference_batch=8"], 0.1 * math.sqrt(6)),
        (4, ["strategy=hardsync", "optimizer.scale=linear", "optimizer.reference_batch=8"], 0.6),
        # Batches that add up are part of the global batch; torch's own rate is scaled, too.
        (2, ["accumulation=3", "optimizer.scale=linear", "optimizer.reference_batch=16"], 0.6),
        (2, ["optimizer=Adam", "optimizer.lr=none", "optimizer.scale=linear", "optimizer.reference_batch=16"], 2e-3),
    ],
    ids=str,
)
def test_the_rate_follows_the_global_batch(tmp_path, size, flags, expected):
    assert _constant(_rates(tmp_path, size, *flags, "epochs=1")) == pytest.approx(expected)


def test_goyals_linear_scaling_with_a_warm_up_and_then_decay(tmp_path):
    """From the reference's rate η evenly to kη in 10 steps, then a tenth after each 6 more."""
    found = _rates(
        tmp_path, 4, "optimizer.scale=linear", "optimizer.reference_batch=16", "schedule=StepLR", "schedule.per=step",
        "schedule.step_size=6", "schedule.gamma=0.1", "schedule.warmup_steps=10", "epochs=4",
    )  # fmt: skip
    expected = [0.1 + 0.3 * t / 10 if t < 10 else 0.4 * 0.1 ** ((t - 10) // 6) for t in range(24)]
    assert found == pytest.approx(expected)


@each("case", [((), 1 / 8), (("schedule.warmup_from=0.5",), 0.5)])
def test_a_warm_up_alone(tmp_path, case):
    flags, start = case
    found = _rates(tmp_path, 2, "schedule.per=step", "schedule.warmup_steps=8", *flags, "epochs=1")
    assert found == pytest.approx([0.1 * (start + (1 - start) * min(t, 8) / 8) for t in range(12)])


def test_on_another_number_of_workers_a_run_goes_on_with_the_rate_of_its_own_batch(tmp_path):
    flags = ("optimizer.scale=linear", "optimizer.reference_batch=16", "schedule=ExponentialLR", "schedule.gamma=0.1")
    assert _constant(_rates(tmp_path, 4, *flags, "epochs=1", "checkpoint.every_steps=3")) == pytest.approx(0.4)

    def body(comm):
        with tiny.training(comm, tmp_path, "schedule=none", *PLAIN, *flags) as trainer:
            trainer.run(checkpoint.latest(tmp_path / "run" / "checkpoints"))
            return trainer.optimizer.param_groups[0]["lr"]

    assert run_virtual(body, 2)[0] == pytest.approx(0.2 * 0.1**3)


def test_a_plateaus_schedule_looks_at_evaluations_only(tmp_path):
    """Six epochs, evaluated after 2, 4 and 6: three looks, of which the second and third are no better."""
    flags = ["schedule=ReduceLROnPlateau", "schedule.patience=0", "schedule.threshold=10.0", "eval_every=2", "epochs=6"]
    found = _rates(tmp_path, 2, *flags)
    expected = [0.1] * 24 + [0.01] * 24 + [0.001] * 24
    assert found == pytest.approx(expected)


def test_a_function_of_the_jobs_file_is_named_alone_in_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from train import tiny\njob = tiny.job\ndef decay(step): return 1 / (1 + step)\n")
    Path("it.toml").write_text(
        'optimizer = {name = "SGD", lr = 0.1}\n[schedule]\nname = "SequentialLR"\nmilestones = [2]\nper = "step"\n'
        '[[schedule.schedules]]\nname = "ConstantLR"\nfactor = 0.5\n'
        '[[schedule.schedules]]\nname = "LambdaLR"\nlr_lambda = "decay"\n'
    )
    _, config = runs.specify(Path("mine.py"), Path("it.toml"), ())
    optimizer = config.optimizer.build([torch.zeros(1, requires_grad=True)])
    schedule, rates = config.schedule.build(optimizer), []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.05, 0.05, 0.1, 0.1 / 2, 0.1 / 3])
    assert config.schedule.schedules[1].options == {"lr_lambda": "mine.py:decay"}


def test_a_rescaled_schedule_goes_on_from_the_new_rate():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    schedule = S.LambdaLR(optimizer, lambda step: 0.5**step)
    rescale(optimizer, schedule, 0.5)
    optimizer.step(), schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
