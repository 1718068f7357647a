"""What transformers' own Trainer does in one process with the joint batches of all workers."""

import sys
from pathlib import Path

from small import TESTED, BySamples, Tokens, arguments, figures, loss, make, metrics, page, write
from transformers import Trainer

folder = Path(sys.argv[1])
CASES = {
    "epochs": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "max_steps": {"max_steps": 5},
    "by_samples": {"lr_scheduler_type": "linear"},
    "schedule_free": {"optim": "schedule_free_sgd", "lr_scheduler_type": "constant", "eval_strategy": "epoch"},
    "models": {"save_strategy": "steps", "save_steps": 2, "save_only_model": True},
    "resumed": {},
}


class PlainBySamples(BySamples, Trainer):
    pass


if __name__ == "__main__":
    for name, given in CASES.items():
        even = name == "by_samples"
        kind, data = PlainBySamples if even else Trainer, Tokens(even=even)
        more = {"train_dataset": data, "compute_metrics": metrics, "compute_loss_func": None if even else loss}
        more["eval_dataset"] = Tokens(TESTED, 2)
        trainer = kind(make(), arguments(folder, 12, **given), **more)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if name == "resumed" else None)
        write(folder / f"{name}.json", figures(trainer))
    page(folder)
