#!/usr/bin/env bash
# JAX on CPUs: jnp.max of an array that is sharded over devices ignores NaN.
#
# Guess: the place of an array changes the order of sums, and nothing else. jnp.max of an array with a NaN is NaN.
# Seen: jax and jaxlib 0.10.2, numpy 2.4.6, 4 CPU devices of one process. On one device the maximum of 1, NaN, 3 and 2
# is NaN. Sharded over the devices it is 3: also inside jit, in ptp and the infinity norm, and with lax.pmax in
# shard_map. The all-reduce drops the NaN of a device's own maximum. min does the same. argmax, the sum and
# isnan().any() see the NaN.
# Why it matters: a maximum is the cheap test of gradients or activations ("is the largest one finite?"), and the
# infinity norm is what clipping divides by. A program that one device stops passes its test once it is sharded.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_platforms", "cpu")
mesh = Mesh(np.array(jax.devices()), ("ranks",))
sharding = NamedSharding(mesh, PartitionSpec("ranks"))
whole = PartitionSpec()


def largest(part):
    return jax.lax.pmax(part.max(), "ranks")


for values in ([1, np.nan, 3, 2], [np.nan, 1, 3, 2, 5, 4, 6, 7]):
    x = np.float32(values)
    for place, x in (("one device", jnp.asarray(x)), (f"{len(jax.devices())} devices", jax.device_put(x, sharding))):
        print(
            f"{place}: max {jnp.max(x)}, jit {jax.jit(jnp.max)(x)}, min {jnp.min(x)}, ptp {jnp.ptp(x)},",
            f"infinity norm {jnp.linalg.norm(x, jnp.inf)} | argmax {jnp.argmax(x)}, sum {jnp.sum(x)},",
            f"isnan {jnp.isnan(x).any()}",
        )
    print("lax.pmax", jax.jit(jax.shard_map(largest, mesh=mesh, in_specs=sharding.spec, out_specs=whole))(x))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
one device: max nan, jit nan, min nan, ptp nan, infinity norm nan | argmax 1, sum nan, isnan True
4 devices: max 3.0, jit 3.0, min 1.0, ptp 2.0, infinity norm 3.0 | argmax 1, sum nan, isnan True
lax.pmax 3.0
one device: max nan, jit nan, min nan, ptp nan, infinity norm nan | argmax 0, sum nan, isnan True
4 devices: max 7.0, jit 7.0, min 2.0, ptp 5.0, infinity norm 7.0 | argmax 0, sum nan, isnan True
lax.pmax 7.0
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
