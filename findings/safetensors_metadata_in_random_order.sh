#!/usr/bin/env bash
# safetensors: the same tensors with the same metadata give other bytes in each call.
#
# Guess: the format is deterministic (tensors are sorted), so that equal checkpoints have equal checksums.
# Seen: safetensors 0.8.0, numpy 2.4.6. The entries of `metadata` are written in the order of a hash table with a
# random seed, so 20 calls of save() in one process give many different headers. With one entry, or none, the bytes are
# equal.
# Why it matters: checksums of files are how replicas on two ranks or nodes are compared, how an upload is skipped, and
# how a run is shown to be repeatable. They differ where nothing does.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from safetensors.numpy import load, save

tensors = {"a": np.ones(3, "float32"), "b": np.zeros(2, "float32")}
for entries in (0, 1, 8):
    metadata = {f"key{number}": "value" for number in range(entries)}
    files = [save(tensors, metadata) for _ in range(20)]
    same = all(np.array_equal(load(file)[name], tensors[name]) for file in files for name in tensors)
    print(entries, "entries:", "one file" if len(set(files)) == 1 else "several files", "| tensors equal:", same)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
0 entries: one file | tensors equal: True
1 entries: one file | tensors equal: True
8 entries: several files | tensors equal: True
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
