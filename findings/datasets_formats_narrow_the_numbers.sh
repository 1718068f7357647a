#!/usr/bin/env bash
# Hugging Face's datasets: with_format("numpy") and "torch" return float64 as float32, and uint64 as negative int64.
#
# Guess: a column has the type that `features` shows, in each format.
# Seen: datasets 5.2.0, torch 2.13.0 (CPU), numpy 2.4.6. Both formats convert floating-point columns to float32 and
# integer columns to int64. Two times of day, as seconds since 1970 in float64, become one and the same number, as
# float32's neighbours are 128 s apart there. 1e300 becomes infinity, and a hash of 2**63 + 5 negative. Without a
# format, and with with_format("numpy", dtype=None), the values are those that are stored.
# Why it matters: formatted columns are what training and preparation see. Times no longer sort or subtract, targets of
# simulations in double precision lose half of their digits, and hashes do not match those of another library.
#
# Exits with 0 if that is still so, with 1 if the behaviour has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from datasets import Dataset

columns = {
    "seconds": np.array([1700000001.25, 1700000060.5]),
    "large": np.array([1e300, 1.0]),
    "hash": np.array([2**63 + 5, 1], "uint64"),
}
stored = Dataset.from_dict(columns)
for name, feature in stored.features.items():
    for kind, kwargs in ((None, {}), ("numpy", {}), ("torch", {}), ("numpy", {"dtype": None})):
        values = stored.with_format(kind, **kwargs)[:][name]
        numbers = values if kind is None else values.tolist()
        print(name, feature.dtype, "| format", kind, *kwargs, getattr(values, "dtype", "list"), *numbers)
PYTHON
cat >"$folder/expected" <<'EXPECTED'
seconds float64 | format None list 1700000001.25 1700000060.5
seconds float64 | format numpy float32 1700000000.0 1700000000.0
seconds float64 | format torch torch.float32 1700000000.0 1700000000.0
seconds float64 | format numpy dtype float64 1700000001.25 1700000060.5
large float64 | format None list 1e+300 1.0
large float64 | format numpy float32 inf 1.0
large float64 | format torch torch.float32 inf 1.0
large float64 | format numpy dtype float64 1e+300 1.0
hash uint64 | format None list 9223372036854775813 1
hash uint64 | format numpy int64 -9223372036854775803 1
hash uint64 | format torch torch.int64 -9223372036854775803 1
hash uint64 | format numpy dtype uint64 9223372036854775813 1
EXPECTED
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/expected" "$folder/seen" && echo "as described"
