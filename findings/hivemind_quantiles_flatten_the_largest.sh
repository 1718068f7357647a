#!/usr/bin/env bash
# hivemind's Quantile8BitQuantization: the largest of 10000 values, 1000, arrives as the mean of the largest 0.4 %.
#
# Guess: an 8-bit code is off by some percent of the largest value, and the largest is kept best, as it sets the scale.
# Seen: hivemind 1.1.12, torch 2.13.0 (CPU), numpy 2.2.6. Each code stands for 1/256 of the elements, and for their
# mean. With 9999 values between -1 and 1 and one of 1000, the latter shares its code with 39 others: it arrives as 26,
# and so do they. Of the tensor's norm 83 % is gone. Uniform8BitQuantization, whose codes are mean values of equal
# intervals, keeps 1000 and is off by up to 0.1 for the others; Float16Compression keeps all.
# Why it matters: gradients and their second moments are of this kind, a few large elements among many small ones. The
# peers average what is left of the large ones, and the small ones beside them are raised many times.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check hivemind==1.1.12 torch==2.13.0 numpy==2.2.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from hivemind.compression import Float16Compression, Quantile8BitQuantization, Uniform8BitQuantization
from hivemind.compression.base import CompressionInfo

values = torch.linspace(-1, 1, 10000)
values[1234] = 1000.0
others = torch.arange(10000) != 1234
for method in (Float16Compression(), Uniform8BitQuantization(), Quantile8BitQuantization()):
    arrived = method.extract(method.compress(values.clone(), CompressionInfo.from_tensor(values)))
    error = (arrived - values)[others].abs().max().item()
    print(type(method).__name__, f"1000 arrives as {arrived[1234].item():.1f}", end=", ")
    print(f"largest error of the others {error:.1f}, norm {arrived.norm().item() / values.norm().item():.2f}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
Float16Compression 1000 arrives as 1000.0, largest error of the others 0.0, norm 1.00
Uniform8BitQuantization 1000 arrives as 1000.0, largest error of the others 0.1, norm 1.00
Quantile8BitQuantization 1000 arrives as 26.0, largest error of the others 25.0, norm 0.17
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
