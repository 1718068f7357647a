"""The same runs by hpcdist.hf.Trainer, and others, on the ranks that mpirun has started."""

import sys
from pathlib import Path

import torch
import transformers
from alone import CASES
from small import (
    TESTED,
    BySamples,
    Stream,
    Tokens,
    arguments,
    figures,
    loss,
    make,
    metrics,
    page,
    parameters,
    write,
)

import hpcdist as hd

folder = Path(sys.argv[1])
hd.init(deadline_s=60)
from hpcdist.hf import Trainer  # noqa: E402


class OwnBySamples(BySamples, Trainer):
    pass


def trained(name, batch, strategy="allreduce", kind=Trainer, resume=None, data=None, dropout=0.0, **given):
    trainer = kind(
        make(dropout), arguments(folder / name, batch, **given), strategy=strategy, train_dataset=data or Tokens(),
        eval_dataset=Tokens(TESTED, 2), compute_metrics=metrics, compute_loss_func=loss if kind is Trainer else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer if hd.finish(trainer.model) is trainer.model else None  # it is finished already


def compared():
    """What `alone.py` does, with allreduce, and hardsync's two workers of three ranks, evaluated each step."""
    for name, given in CASES.items():
        even = name == "by_samples"
        kind = OwnBySamples if even else Trainer
        if name == "resumed":  # from a checkpoint without the ranks' state
            given = {**given, "resume": str(folder / "models" / "checkpoint-2")}
        yield name, figures(trained(name, 4, kind=kind, data=Tokens(even=even), **given))
    each_step = {"eval_strategy": "steps", "eval_steps": 1}
    yield "hardsync", figures(trained("hardsync", 6, "hardsync", **CASES["accumulated"], **each_step))


def interrupted(name, strategy, batch, steps):
    """Evaluate and save within epochs; go on from steps in the middle of the first epoch, and at its end."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "dropout": 0.1}
    whole = trained(name, batch, strategy, save_steps=1, **often)
    last = Trainer(make(), arguments(folder / name, batch), strategy=strategy)  # which the main process has saved
    last._load_from_checkpoint(str(folder / name / f"checkpoint-{whole.state.global_step}"))
    found = {"whole": parameters(whole.model), "saved": parameters(last.model), "main": whole.is_world_process_zero()}
    evaluated = [each for each in whole.state.log_history if "eval_loss" in each]
    found["evaluated"] = [(each["step"], each["eval_order"]) for each in evaluated]
    found["resumed"] = []
    for step in steps:
        checkpoint = str(folder / name / f"checkpoint-{step}")
        resumed = trained(f"{name}-{step}", batch, strategy, resume=checkpoint, save_steps=100, **often)
        found["resumed"].append(parameters(resumed.model))
    return found


def refusals():
    """What each refused run says."""
    model = make()
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain = Trainer(model, arguments(folder / "twice", 4), train_dataset=Tokens(), optimizers=(optimizer, None))
    yield "distributed twice", plain.train
    hd.finish(model)
    yield "two ways of distributing", lambda: trained("refused", 4, auto_find_batch_size=True)
    softsync = folder / "interrupted-softsync" / "checkpoint-3"
    yield "other workers", lambda: trained("refused", 4, {"name": "softsync", "servers": 2}, resume=str(softsync))
    hd.finish(hd.session.world.current().optimizers[0].strategy.model.module)
    streamed = {"data": Stream(), "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    yield "a stream", lambda: trained("refused", 4, "hardsync", **streamed)
    hd.finish(hd.session.world.current().optimizers[0].strategy.model.module)
    model = make()
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    args = arguments(folder / "plain", 4)
    yield (
        "the plain Trainer",
        transformers.Trainer(model, args, train_dataset=Tokens(), optimizers=(optimizer, None)).train,
    )


def message(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main():
    for name, value in compared():
        results[name] = value
    page(folder)
    for name, options, batch, steps in (
        ("allreduce", {}, 4, (3, 4)),
        ("gossip_pull", {}, 4, (3,)),
        ("local_sgd", {"period": 2}, 4, (3, 4)),
        ("softsync", {"splits": 2}, 6, (3,)),
    ):
        strategy = {"name": name, **options}
        results[f"interrupted {name}"] = interrupted(f"interrupted-{name}", strategy, batch, steps)
    stream = trained("stream", 4, data=Stream(), max_steps=4)
    results["stream"] = [stream.state.global_step, len(parameters(stream.model))]
    results["refused"] = {}
    for name, work in refusals():
        results["refused"][name] = message(work)


results = {}
main()
write(folder / f"rank{hd.rank()}.json", results)
