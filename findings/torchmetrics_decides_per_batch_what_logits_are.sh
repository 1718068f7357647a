#!/usr/bin/env bash
# torchmetrics' BinaryAUROC of logits: the value depends on how the data are cut into batches.
#
# Guess: update() over two batches followed by compute() equals one update() with both, since an AUROC depends on the
# order of the scores alone.
# Seen: torchmetrics 1.9.0, torch 2.13.0 (CPU). update() takes scores for logits if any of the batch is outside [0, 1],
# and applies the sigmoid to that batch only. A batch whose logits all lie within [0, 1] stays as it is, and its scores
# are ranked against the sigmoids of the others. The rule is documented; that it acts per batch (and so per rank)
# surprises.
# Why it matters: with small batches, as at the start of training where logits are near 0, the metric changes with the
# batch size and with the number of ranks, with equal outputs of the model.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from torchmetrics.classification import BinaryAUROC

logits = torch.tensor([0.1, 0.2, 0.3, 0.4, -3.0, -2.0, 0.5, 2.0])
labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
for name, scores in (("logits", logits), ("probabilities", logits.sigmoid())):
    for size in (8, 4):
        metric = BinaryAUROC()
        for batch, truth in zip(scores.split(size), labels.split(size), strict=True):
            metric.update(batch, truth)
        print(f"{name} in batches of {size}: {metric.compute().item():.4f}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
logits in batches of 8: 0.7333
logits in batches of 4: 0.8000
probabilities in batches of 8: 0.7333
probabilities in batches of 4: 0.7333
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
