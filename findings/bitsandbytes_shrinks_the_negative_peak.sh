#!/usr/bin/env bash
# bitsandbytes' 8-bit blocks: the largest element of a block is exact if it is positive, and shrinks if it is negative.
#
# Guess: the values are scaled by the largest magnitude, so that one is stored exactly, whatever its sign; and what was
# quantized once does not change when it is quantized again.
# Seen: bitsandbytes 0.50.2, torch 2.13.0 (CPU). quantize_blockwise's table of 256 values has 1 but not -1; the least is
# -0.993. A block whose largest magnitude is negative loses 0.7 % of it each time that it is quantized and dequantized,
# since the scale shrinks along: after 100 times half is left. The mirrored block keeps its peak. nf4 and fp4 have both.
# Why it matters: weights, moments and messages in 8 bits are quantized again in each step or exchange. The loss is a
# drift of one sign, not noise: averages over ranks or steps do not cancel it, and error estimates from |x| miss it.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

table = create_dynamic_map()
print(f"table of {len(table)} values from {table.min().item():.4f} to {table.max().item():.4f}")
for peak in (1.0, -1.0):
    values = torch.tensor([peak, 0.5, -0.25, 0.0])
    for trip in range(1, 101):
        values = dequantize_blockwise(*quantize_blockwise(values))
        if trip in (1, 10, 100):
            print(f"peak {peak} after {trip}: {values[0].item():.3f}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
table of 256 values from -0.9930 to 1.0000
peak 1.0 after 1: 1.000
peak 1.0 after 10: 1.000
peak 1.0 after 100: 1.000
peak -1.0 after 1: -0.993
peak -1.0 after 10: -0.932
peak -1.0 after 100: -0.494
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
