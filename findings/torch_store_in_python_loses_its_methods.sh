#!/usr/bin/env bash
# torch.distributed: a Store written in Python works only as long as somebody else keeps the Python object.
#
# Guess: PrefixStore, or a process group, keeps the store that it is given, as any container keeps its elements.
# Seen: torch 2.13.0 (CPU). It keeps the part of the store that is in C++. Once Python has no other reference to the
# object, the methods that the subclass overrides are gone: the next call raises "fn INTERNAL ASSERT FAILED ... please
# report a bug to PyTorch. Not implemented." If the object is in a reference cycle, that begins with some later run of
# the garbage collector.
# Why it matters: a store over MPI, a database or a log is handed to init_process_group and not kept; what fails later
# is a new group far away, in some runs only.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import gc

import torch.distributed as dist


class Dictionary(dist.Store):
    def __init__(self):
        super().__init__()
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]


def tried(store):
    try:
        store.set("key", "value")
        return store.get("key")
    except RuntimeError as error:
        return "internal assert, not implemented" if "Not implemented" in str(error) else error


kept = Dictionary()
print("kept:", tried(dist.PrefixStore("a", kept)))
print("not kept:", tried(dist.PrefixStore("b", Dictionary())))
cycle = Dictionary()
cycle.itself = cycle
prefixed = dist.PrefixStore("c", cycle)
del cycle
print("in a cycle:", tried(prefixed))
gc.collect()
print("in a cycle, collected:", tried(prefixed))
PYTHON
cat >"$folder/expected" <<'EXPECTED'
kept: b'value'
not kept: internal assert, not implemented
in a cycle: b'value'
in a cycle, collected: internal assert, not implemented
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
