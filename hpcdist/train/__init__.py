"""Run training jobs: the job, the loop, evaluation, resuming."""

from hpcdist.train.job import Job, Metric, accuracy, load_job, squared_error
from hpcdist.train.log import Progress
from hpcdist.train.loop import Trainer
from hpcdist.train.resume import Position

__all__ = ["Job", "Metric", "Position", "Progress", "Trainer", "accuracy", "load_job", "squared_error"]
