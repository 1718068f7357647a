#!/usr/bin/env bash
# torchmetrics' MetricCollection: after an easy first batch the top-2 accuracy is the top-1 accuracy, for good.
#
# Guess: a collection gives for each metric what that metric gives by itself; what it computes once for several of them
# depends on their types and arguments.
# Seen: torchmetrics 1.9.0, torch 2.13.0 (CPU). After the first update() the collection compares the metrics' counters,
# and those that are equal by then share them from there on. If the model is right about the whole first batch, the
# accuracies with top_k=1 and top_k=2 (of the default average, "macro") have equal counters, and both are top-1 for the
# rest. Accuracies with the thresholds 0.5 and 0.9 are merged likewise. A first batch that tells them apart, or
# compute_groups=False, gives the right values. The documentation names the groups, but not that one batch makes them.
# Why it matters: top-1 and top-5 side by side are this field's usual report. Which number stands there depends on the
# first batch: on the order of the data and on the batch size, and it may differ between ranks.
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
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

easy = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1]]), torch.tensor([0, 1])
hard = torch.tensor([[0.4, 0.5, 0.1], [0.1, 0.4, 0.5], [0.5, 0.4, 0.1]]), torch.tensor([0, 1, 2])
sure = torch.tensor([0.95, 0.02]), torch.tensor([1, 0])
unsure = torch.tensor([0.6, 0.7, 0.8]), torch.tensor([0, 0, 1])


def top():
    return {f"top {k}": MulticlassAccuracy(3, top_k=k) for k in (1, 2)}


def thresholds():
    return {f"above {percent} %": BinaryAccuracy(percent / 100) for percent in (50, 90)}


for metrics, batches in ((top, (easy, hard)), (top, (hard, easy)), (thresholds, (sure, unsure))):
    for name, kwargs in (("grouped", {}), ("each for itself", {"compute_groups": False})):
        collection = MetricCollection(metrics(), **kwargs)
        for scores, labels in batches:
            collection.update(scores, labels)
        first = "easy" if batches[0] is easy else "hard" if batches[0] is hard else "sure"
        print(f"{first} batch first, {name}:", *(f"{k} {v.item():.2f}" for k, v in collection.compute().items()))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
easy batch first, grouped: top 1 0.33 top 2 0.33
easy batch first, each for itself: top 1 0.33 top 2 0.67
hard batch first, grouped: top 1 0.33 top 2 0.67
hard batch first, each for itself: top 1 0.33 top 2 0.67
sure batch first, grouped: above 50 % 0.60 above 90 % 0.60
sure batch first, each for itself: above 50 % 0.60 above 90 % 0.80
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
