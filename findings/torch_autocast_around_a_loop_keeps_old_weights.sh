#!/usr/bin/env bash
# torch.autocast around a training loop: the model computes with its first weights in every step.
#
# Guess: one autocast around the whole loop does the same as one around each forward pass, and is at most slower.
# Seen: torch 2.13.0 (CPU, bfloat16). autocast keeps the bfloat16 copy of each parameter until its outermost context
# ends; a step of the optimizer does not drop it. Around each forward pass the loss falls to 0. Around the loop it stays
# as in the first step, each gradient is that of the first step, and the weight runs past the minimum, 1, without end. A
# weight that is loaded inside the context is not seen either. cache_enabled=False and torch.clear_autocast_cache()
# after each step mend it. Nothing warns.
# Why it matters: `with torch.autocast(...): train_epoch()` is shorter than a context in each step. Averages of the
# ranks' models, exchanged weights and checkpoints that are loaded inside one context are ignored in the same way.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import contextlib

import torch


def autocast(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


def train(around_loop, around_forward, after_step=lambda: None):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    x = y = torch.ones(1, 1)
    losses = []
    with around_loop:
        for _ in range(8):
            optimizer.zero_grad()
            with around_forward:
                loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            after_step()
            losses.append(f"{loss.item():.2f}")
        trained = model.weight.item()
        with torch.no_grad():
            model.weight.fill_(3)
        return "loss", *losses, f"| weight {trained:.2f} | output of weight 3: {model(x).item():.2f}"


nothing = contextlib.nullcontext()
print("around each forward pass:", *train(nothing, autocast()))
print("around the loop:", *train(autocast(), nothing))
print("around the loop, cache_enabled=False:", *train(autocast(cache_enabled=False), nothing))
print("around the loop, cache cleared:", *train(autocast(), nothing, torch.clear_autocast_cache))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
around each forward pass: loss 1.00 0.25 0.06 0.02 0.00 0.00 0.00 0.00 | weight 1.00 | output of weight 3: 3.00
around the loop: loss 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 | weight 4.00 | output of weight 3: 0.00
around the loop, cache_enabled=False: loss 1.00 0.25 0.06 0.02 0.00 0.00 0.00 0.00 | weight 1.00 | output of weight 3: 3.00
around the loop, cache cleared: loss 1.00 0.25 0.06 0.02 0.00 0.00 0.00 0.00 | weight 1.00 | output of weight 3: 3.00
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
