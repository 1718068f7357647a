"""`evaluations.jsonl`: the metrics of each evaluation of a run, one line each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hpcdist.errors import DataError
from hpcdist.records.bounded import read_bounded
from hpcdist.records.durable import append, replace_durably, writing

FILE_NAME = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the ranks' common parameters."""

    step: int  # since the run began
    epoch: int  # number of epochs that have ended
    samples: int  # trained on so far, by all ranks together
    seconds: float  # of training, without evaluations and checkpoints
    metrics: dict[str, float]
    joules: float | None = None  # since the run began, without this evaluation; None where they were not measured

    # A metric may be NaN or infinite, and must be read back as such.
    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


_EVALUATION: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)


def append_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Append an evaluation as a line. Raise OutputError where it can't be written; then the file is unchanged."""
    path = folder / FILE_NAME
    with writing(path), open(path, "ab", buffering=0) as file:
        append(file, path, _EVALUATION.dump_json(evaluation) + b"\n")


def keep_evaluations(folder: Path, step: int) -> None:
    """Remove the evaluations after `step`, from which the run goes on: it repeats them."""
    if not (folder / FILE_NAME).exists():
        return
    earlier = [evaluation for evaluation in read_evaluations(folder) if evaluation.step <= step]
    replace_durably(folder / FILE_NAME, b"".join(_EVALUATION.dump_json(one) + b"\n" for one in earlier))


def read_evaluations(folder: str | Path) -> list[Evaluation]:
    """Read all evaluations of a run, the oldest first; none without a file. A last line that is cut short is left out.

    Raises:
        DataError: a line is no evaluation.
    """
    path = Path(folder) / FILE_NAME
    evaluations = []
    try:
        text = read_bounded(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} must be readable; got {error.strerror}. Move it away to go on.") from None
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            evaluations.append(_EVALUATION.validate_json(line))
        except ValidationError as error:
            raise DataError(
                f"{path}:{number} must be an evaluation; got {line[:60]!r} ({error.errors()[0]['msg']}). Delete this "
                "line to read the others."
            ) from None
    return evaluations
