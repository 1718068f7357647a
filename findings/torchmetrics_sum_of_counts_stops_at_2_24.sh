#!/usr/bin/env bash
# torchmetrics' SumMetric: a count of samples or tokens stops at 16777216.
#
# Guess: the sum of integers is an integer, or is kept wide enough to count tokens.
# Seen: torchmetrics 1.9.0, torch 2.13.0 (CPU). The state is one float32, whatever the type of the updates. From 2**24
# on each update with 1 changes nothing. MeanMetric's total weight is float32 as well. set_dtype(torch.float64) is the
# way out.
# Why it matters: 2**24 tokens are a few steps of a large model, and 2**24 images some epochs of ImageNet. A counter
# that is fed with a few at a time stops or drifts, and so do the throughput and the schedules that are computed from
# it.
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
from torchmetrics import SumMetric

for metric in (SumMetric(), SumMetric().set_dtype(torch.float64)):
    metric.update(torch.tensor(2**24))
    for _ in range(1000):
        metric.update(torch.tensor(1))
    print(metric.compute().dtype, int(metric.compute()), "of", 2**24 + 1000)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
torch.float32 16777216 of 16778216
torch.float64 16778216 of 16778216
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
