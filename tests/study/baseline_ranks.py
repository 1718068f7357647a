"""The ranks of the baselines' test: all-reduce, and each library, train one job; rank 0 writes their evaluations."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from hpcdist import session
from hpcdist.registry import catalogue
from hpcdist.tools.baselines.base import BaselineTrainer
from hpcdist.train import runs

comm, folder, names = session.init(), Path(sys.argv[1]), sys.argv[2:]
job, settings = folder / "plain.py", [f"data.path={folder}/digits.h5", "strategy=allreduce", "batch_size=16"]
settings += ["epochs=none", "budget.samples=900", "eval_every_samples=300", "accumulation=2", "clip_norm=1.0"]
runs.train(comm, job, None, settings, folder / "allreduce")
for name in names:
    library = partial(BaselineTrainer, catalogue("baselines").load(name))
    runs.train(comm, job, None, settings, folder / name, make=library)
try:
    runs.train(comm, job, None, [*settings, "on_nonfinite=skip"], folder / "refused", make=library)
except Exception as error:
    refused = str(error)
if comm.rank == 0:
    (folder / "refused.json").write_text(json.dumps(refused))
