#!/usr/bin/env bash
# Flax's LayerNorm, BatchNorm and GroupNorm: inputs far from zero are scaled by a variance that is rounding error.
#
# Guess: a normalization layer returns a standard deviation of 1, also for inputs with a large mean; to remove that is
# what it is for.
# Seen: flax 0.12.8, jax 0.10.2 (CPU), numpy 2.4.6, float32. By default the variance is mean(x * x) - mean(x) ** 2, and
# what is below 0 is set to 0. With a mean of 101325 and a standard deviation of 10 the squares are rounded to multiples
# of 1024, and the variance, 100, is lost. The outputs are too large or too small by a factor of more than 3. With
# use_fast_variance=False, which the documentation calls more stable, they are right.
# Why it matters: this field's inputs are pressures, temperatures, coordinates and times, and are often normalized by
# the first layer alone. The loss may still fall, and a model that is moved from torch, whose layers are exact here,
# changes.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check flax==0.12.8 jax==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

layers = {
    "LayerNorm": lambda **kwargs: nn.LayerNorm(**kwargs),
    "GroupNorm": lambda **kwargs: nn.GroupNorm(num_groups=1, **kwargs),
    "BatchNorm": lambda **kwargs: nn.BatchNorm(use_running_average=False, axis=(), **kwargs),
}
for mean, deviation in ((0, 1), (101325, 10)):
    values = mean + deviation * np.random.default_rng(0).normal(size=(16, 256))
    x = jnp.asarray(values, "float32")
    for name, layer in layers.items():
        for fast in (True, False):
            normalize = layer(use_fast_variance=fast)
            variables = normalize.init(jax.random.key(0), x)
            found = float(normalize.apply(variables, x, mutable=["batch_stats"])[0].std())
            verdict = "right" if abs(found - 1) < 0.01 else "off by more than 3" if not 0.33 < found < 3 else found
            print(mean, "+-", deviation, name, "fast" if fast else "slow", "variance:", verdict)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
0 +- 1 LayerNorm fast variance: right
0 +- 1 LayerNorm slow variance: right
0 +- 1 GroupNorm fast variance: right
0 +- 1 GroupNorm slow variance: right
0 +- 1 BatchNorm fast variance: right
0 +- 1 BatchNorm slow variance: right
101325 +- 10 LayerNorm fast variance: off by more than 3
101325 +- 10 LayerNorm slow variance: right
101325 +- 10 GroupNorm fast variance: off by more than 3
101325 +- 10 GroupNorm slow variance: right
101325 +- 10 BatchNorm fast variance: off by more than 3
101325 +- 10 BatchNorm slow variance: right
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
