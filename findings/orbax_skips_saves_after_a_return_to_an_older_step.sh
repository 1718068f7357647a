#!/usr/bin/env bash
# orbax's CheckpointManager: after a return to an older step it saves nothing until training has passed the newest one.
#
# Guess: save(step) writes a checkpoint whenever save_interval_steps divides the step and the step has none yet.
# Seen: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6. Checkpoints 10, 20 and 30 exist, 10 is restored, and training
# goes on from there. save(12), save(14), save(16) and save(28) return False and write nothing, with
# save_interval_steps=2 and with the default, which saves every step; save(32) writes. A step must be above the newest
# one in the folder. Checkpoints 20 and 30 are still those of the abandoned run. Nothing is raised; force=True saves
# step 12.
# Why it matters: a run returns to an earlier checkpoint after a spike of the loss, or to try a lower learning rate. A
# job that ends on the way loses all steps, and resumes from latest_step(), which is of the run that was abandoned.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp


def state(run):
    return ocp.args.StandardSave({"run": jnp.array(run)})


for interval in (2, 1):
    options = ocp.CheckpointManagerOptions(save_interval_steps=interval)
    folder = f"{sys.argv[1]}/every_{interval}"
    with ocp.CheckpointManager(folder, options=options) as manager:
        print(f"every {interval}: run 1:", *(f"{step} {manager.save(step, args=state(1))}" for step in (10, 20, 30)))
        manager.wait_until_finished()
        manager.restore(10)
        print("run 2:", *(f"{step} {manager.save(step, args=state(2))}" for step in (12, 14, 16, 20, 28, 30, 32)))
        manager.wait_until_finished()
        print("in the folder:", *(f"{step} of run {manager.restore(step)['run']}" for step in manager.all_steps()))
        print("with force=True: 12", manager.save(12, args=state(2), force=True))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
every 2: run 1: 10 True 20 True 30 True
run 2: 12 False 14 False 16 False 20 False 28 False 30 False 32 True
in the folder: 10 of run 1 20 of run 1 30 of run 1 32 of run 2
with force=True: 12 True
every 1: run 1: 10 True 20 True 30 True
run 2: 12 False 14 False 16 False 20 False 28 False 30 False 32 True
in the folder: 10 of run 1 20 of run 1 30 of run 1 32 of run 2
with force=True: 12 True
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>"$folder/log" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
