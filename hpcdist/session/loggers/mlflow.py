"""MLflow, with its store in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from hpcdist.session.loggers.base import LoggedRun, Logger

BATCH = 100  # maximum number of parameters in a call of MLflow
LONGEST = 6000  # characters of a parameter


class MLflow(Logger):
    """Write an MLflow run. View it with `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow/mlflow.db`.

    The store is a database, because MLflow refuses plain files since version 3.
    """

    package = "mlflow"

    def __init__(self, run: LoggedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = run.folder.resolve()
        folder.mkdir(exist_ok=True)
        self._client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        self._id = run.id(lambda: self._started(run.name, folder))
        if run.first_step == 1:
            params = [Param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
            for first in range(0, len(params), BATCH):
                self._client.log_batch(self._id, params=params[first : first + BATCH])

    def _started(self, name: str, folder: Path) -> str:
        experiment = self._client.create_experiment("hpcdist", artifact_location=folder.as_uri())
        return self._client.create_run(experiment, run_name=name).info.run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = round(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, v, now_ms, step) for name, v in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)
