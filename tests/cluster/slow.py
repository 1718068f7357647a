"""tests/train/tiny.py slowed down, so that something can happen to the job meanwhile.

Each rank leaves a file in the run's folder that names its node and its process.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from train import tiny

STEP_S = 0.04
if "HPCDIST_RUN" in os.environ:  # not where `submit --wait` looks how long the run will be
    Path(os.environ["HPCDIST_RUN"], f"on-{os.environ['SLURMD_NODENAME']}-{os.getpid()}").touch()


def loss(outputs, targets):
    time.sleep(STEP_S)
    return tiny.job.loss(outputs, targets)


job = dataclasses.replace(tiny.job, loss=loss)
