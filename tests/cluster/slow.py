"""tests/train/tiny.py slowed down, so that something can happen to the job meanwhile.

Where the environment has DIES=RANK, that rank dies early in its second epoch, while the others are at work, too.
"""

import dataclasses
import itertools
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from train import tiny

STEP_S = 0.04
DIES_AT = 33  # of 30 in an epoch
steps = itertools.count(1)


def loss(outputs, targets):
    time.sleep(STEP_S)
    if next(steps) == DIES_AT and os.environ.get("DIES") == os.environ.get("OMPI_COMM_WORLD_RANK", "none"):
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny.job.loss(outputs, targets)


job = dataclasses.replace(tiny.job, loss=loss)
