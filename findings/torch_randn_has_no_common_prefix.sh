#!/usr/bin/env bash
# torch.randn: with one seed, the first numbers depend on how many are drawn.
#
# Guess: randn(16) begins with the numbers of randn(15), as rand(16) begins with those of rand(15).
# Seen: torch 2.13.0 (CPU, float32). Fewer than 16 numbers are drawn one by one. From 16 on they are made in blocks of
# 16, in which each number needs its partner 8 places further, and the last 16 are drawn anew if the length is no
# multiple of 16. So none of the first 15 is shared with randn(16), and of randn(17) only the first is shared with
# randn(16).
# Why it matters: a shard, or a padded or truncated copy of a weight, that is initialized from the seed of the whole
# has other values than the whole; adding one row to a tensor changes up to 16 numbers before it.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch

for draw in (torch.rand, torch.randn):
    for long, short in ((15, 8), (16, 15), (17, 16), (24, 16), (32, 16)):
        torch.manual_seed(0)
        numbers = draw(long)[:short]
        torch.manual_seed(0)
        shared, name = (numbers == draw(short)).sum(), draw.__name__
        print(f"{name}({long}) shares {shared} of {short} with {name}({short})")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
rand(15) shares 8 of 8 with rand(8)
rand(16) shares 15 of 15 with rand(15)
rand(17) shares 16 of 16 with rand(16)
rand(24) shares 16 of 16 with rand(16)
rand(32) shares 16 of 16 with rand(16)
randn(15) shares 8 of 8 with randn(8)
randn(16) shares 0 of 15 with randn(15)
randn(17) shares 1 of 16 with randn(16)
randn(24) shares 8 of 16 with randn(16)
randn(32) shares 16 of 16 with randn(16)
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
