"""A small language model and its data; figures of runs, for tests to compare."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

SAMPLES, TESTED = 37, 21  # multiples of no number of ranks or batches


class Tokens(Dataset):
    """Random tokens; each sample has another number of labels, or all have as many."""

    def __init__(self, count: int = SAMPLES, seed: int = 1, even: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 32, (count, 8), generator=generator)
        self.lengths = torch.full((count,), 8) if even else torch.randint(2, 9, (count,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        labels = self.tokens[i].clone()
        labels[self.lengths[i] :] = -100
        return {"input_ids": self.tokens[i], "labels": labels}


class Stream(IterableDataset):
    """The same samples, one after the other."""

    def __iter__(self):
        return iter(Tokens())


def make(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    config = GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    return GPT2LMHeadModel(config).double()


def arguments(folder: Path, batch: int, **given) -> TrainingArguments:
    given = {
        "num_train_epochs": 2, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "adam_epsilon": 1e-4,  # or rounding decides the direction of gradients that are 0
        "max_grad_norm": 0.5, "per_device_train_batch_size": batch, "per_device_eval_batch_size": 4,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    } | given  # fmt: skip
    return TrainingArguments(str(folder), **given)


def loss(outputs, labels, num_items_in_batch=None):
    """The model's own loss, which transformers computes in float32, in float64."""
    guesses, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(guesses, wanted, reduction="sum") / num_items_in_batch


def metrics(found) -> dict[str, float]:
    """Accuracy, and a figure in which the order of samples counts."""
    guessed, labels = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
    order = float(found.label_ids[:, 0].astype(float) @ np.arange(len(labels)))
    return {"accuracy": float((guessed == labels)[labels != -100].mean()), "order": order}


def parameters(model) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def figures(trainer) -> dict:
    """What a run has logged, its end, and an evaluation."""
    logged = [{k: v for k, v in each.items() if "runtime" not in k and "per_second" not in k}
              for each in trainer.state.log_history]  # fmt: skip
    evaluated = {k: v for k, v in trainer.evaluate(Tokens(TESTED, 2)).items() if "_per_" not in k and "time" not in k}
    return {"parameters": parameters(trainer.model), "logged": logged, "evaluated": evaluated}


def write(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def page(folder: Path) -> None:
    """Runs the page's script, which has been written there; what it prints goes to a file."""
    with (folder / f"page-{os.getpid()}.txt").open("w") as said, redirect_stdout(said):
        exec(compile((folder / "page.py").read_text(), "page.py", "exec"), {"__name__": "page"})


class BySamples:
    """A Trainer whose loss counts samples, and not labels."""

    model_accepts_loss_kwargs = property(lambda self: False, lambda self, value: None)
