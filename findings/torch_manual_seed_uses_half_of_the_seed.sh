#!/usr/bin/env bash
# torch.manual_seed on the CPU: seeds that differ only above bit 32 give the same random numbers.
#
# Guess: all 64 bits count. Seeds from -2**63 to 2**64 - 1 are accepted, and initial_seed() returns the whole number.
# Seen: torch 2.13.0 (CPU), numpy 2.4.6. The Mersenne Twister starts from the lower 32 bits alone. With the seeds 5,
# 2**32 + 5 and 2 * 2**32 + 5 rand, randn, randperm and the order of a DistributedSampler are the same, and -1 is the
# same seed as 2**32 - 1. NumPy's default_rng gives different numbers for all seeds that it takes.
# Why it matters: people pack two numbers into one seed, `epoch << 32 | sample` or `rank << 32 | seed`, so that no two
# streams meet. Then each epoch has the same augmentations, or each rank the same dropout masks. Nothing shows it, as
# initial_seed() differs.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
import torch
from torch.utils.data import DistributedSampler

for seed in (5, (1 << 32) + 5, (2 << 32) + 5, 6, (1 << 32) - 1, -1):
    generator = torch.Generator().manual_seed(seed)
    print(f"seed {seed}, initial_seed {generator.initial_seed()}:", end=" ")
    print(f"rand {torch.rand((), generator=generator):.4f},", end=" ")
    print(f"randn {torch.randn((), generator=generator):.4f},", end=" ")
    print("randperm", *torch.randperm(5, generator=generator).tolist(), end=", ")
    print("sampler", *DistributedSampler(range(5), num_replicas=1, rank=0, seed=seed), end=", ")
    print("NumPy", "refuses" if seed < 0 else f"{np.random.default_rng(seed).random():.4f}")
PYTHON
cat >"$folder/expected" <<'EXPECTED'
seed 5, initial_seed 5: rand 0.8303, randn 1.2784, randperm 0 1 4 3 2, sampler 1 3 0 4 2, NumPy 0.8050
seed 4294967301, initial_seed 4294967301: rand 0.8303, randn 1.2784, randperm 0 1 4 3 2, sampler 1 3 0 4 2, NumPy 0.7742
seed 8589934597, initial_seed 8589934597: rand 0.8303, randn 1.2784, randperm 0 1 4 3 2, sampler 1 3 0 4 2, NumPy 0.2377
seed 6, initial_seed 6: rand 0.5722, randn -1.8136, randperm 2 4 0 3 1, sampler 0 2 1 3 4, NumPy 0.5382
seed 4294967295, initial_seed 4294967295: rand 0.9938, randn -0.9074, randperm 0 3 2 4 1, sampler 1 3 4 2 0, NumPy 0.2519
seed -1, initial_seed 18446744073709551615: rand 0.9938, randn -0.9074, randperm 0 3 2 4 1, sampler 1 3 4 2 0, NumPy refuses
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
