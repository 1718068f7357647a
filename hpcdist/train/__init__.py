"""Training runs: the job, the loop, evaluation, resuming."""

from hpcdist.train.job import Job, Metric, accuracy, load_job, squared_error
from hpcdist.train.loop import Position, Progress, Trainer

__all__ = ["Job", "Metric", "Position", "Progress", "Trainer", "accuracy", "load_job", "squared_error"]
