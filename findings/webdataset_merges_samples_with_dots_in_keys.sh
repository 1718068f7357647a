#!/usr/bin/env bash
# webdataset: samples that TarWriter was given with dots in their keys are read back as one sample.
#
# Guess: a sample that is written under a key is read under this key; a key that the format can't hold is refused.
# Seen: webdataset 1.0.2, numpy 2.4.6. A sample's key ends at the first dot of the file's name (the format's documented
# rule), and TarWriter does not check it. Of "lr0.1", "lr0.2" and "lr0.3", each with a class and an array, one sample
# "lr0" comes back, with six fields that are called "1.cls", "2.cls" and so on. decode() reads them without complaint.
# Keys without dots are right.
# Why it matters: keys are made of file names, and those have dots (x0.5, v1.2, IMG.0001). A shard then holds fewer
# samples than were written, and a count of samples per epoch, or an equal share per rank, is wrong.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check webdataset==1.0.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import numpy as np
import webdataset as wds

for keys in (["lr01", "lr02", "lr03"], ["lr0.1", "lr0.2", "lr0.3"]):
    with wds.TarWriter(sys.argv[1] + "/shard.tar") as sink:
        for number, key in enumerate(keys):
            sink.write({"__key__": key, "cls": number, "npy": np.full(2, number)})
    samples = list(wds.WebDataset(sys.argv[1] + "/shard.tar", shardshuffle=False).decode())
    print("wrote", len(keys), "samples:", *keys, "| read", len(samples))
    for sample in samples:
        print(" ", sample["__key__"], {name: sample[name] for name in sorted(sample) if name[0] != "_"})
PYTHON
cat >"$folder/expected" <<'EXPECTED'
wrote 3 samples: lr01 lr02 lr03 | read 3
  lr01 {'cls': 0, 'npy': array([0, 0])}
  lr02 {'cls': 1, 'npy': array([1, 1])}
  lr03 {'cls': 2, 'npy': array([2, 2])}
wrote 3 samples: lr0.1 lr0.2 lr0.3 | read 1
  lr0 {'1.cls': 0, '1.npy': array([0, 0]), '2.cls': 1, '2.npy': array([1, 1]), '3.cls': 2, '3.npy': array([2, 2])}
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" "$folder" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
