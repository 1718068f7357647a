#!/usr/bin/env bash
# transformers' Trainer: the eval_loss of a language model depends on the batch size, with equal outputs of the model.
#
# Guess: eval_loss is the mean over all tokens, and per_device_eval_batch_size changes speed and memory only.
# Seen: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (CPU, one process). The model's loss is the mean over the
# tokens of a batch, and evaluate() averages these means with the number of samples as weights. So a token of a short
# text counts more than one of a long text if they are in different batches, and equally if they share one. Three texts
# of 2 tokens and one of 30 give three different losses for batch sizes 1, 2 and 4.
# Why it matters: the best checkpoint, early stopping and the reported perplexity follow from eval_loss. It changes with
# the batch size and so with the number of devices, and with the order of the samples; and texts differ in length.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import math
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PrinterCallback, Trainer, TrainingArguments


class Unigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([2.0, 0.0]))

    def forward(self, labels):
        logits = self.logits.expand(*labels.shape, 2)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}


def collate(samples):
    return {"labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)}


texts = [torch.ones(2, dtype=torch.int64)] * 3 + [torch.zeros(30, dtype=torch.int64)]
model = Unigram()
print("mean over all tokens", f"{cross_entropy(model.logits.expand(36, 2), torch.cat(texts)).item():.3f}")
for size in (1, 2, 4):
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": size}
    trainer = Trainer(model, TrainingArguments(sys.argv[1], **options), data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    loss = trainer.evaluate([{"labels": text} for text in texts])["eval_loss"]
    print(f"batches of {size}: eval_loss {loss:.3f} perplexity {math.exp(loss):.2f}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
mean over all tokens 0.460
batches of 1: eval_loss 1.627 perplexity 5.09
batches of 2: eval_loss 1.189 perplexity 3.29
batches of 4: eval_loss 0.460 perplexity 1.58
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
