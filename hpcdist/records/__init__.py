"""The files of a run: `run.json`, step records per rank, `evaluations.jsonl`, `summary.json`."""

from hpcdist.records.bounded import open_regular, parse_json, read_bounded
from hpcdist.records.digest import digest, tensor_bytes
from hpcdist.records.durable import Stamp, replace_durably, stamp, sync, write_durably, writing
from hpcdist.records.evaluations import Evaluation, append_evaluation, keep_evaluations, read_evaluations
from hpcdist.records.lock import claimed, is_abandoned, locked, making
from hpcdist.records.run import RunRecord, Start, begin_run, copy_job, end_run, load_run, now
from hpcdist.records.step import RecordTail, RecordWriter, StepRecord, read_records, record_files, record_path
from hpcdist.records.summary import Seconds, Staleness, Summary, load_summary, summarise, write_summary

__all__ = [
    "Evaluation",
    "RecordTail",
    "RecordWriter",
    "RunRecord",
    "Seconds",
    "Staleness",
    "Stamp",
    "Start",
    "StepRecord",
    "Summary",
    "append_evaluation",
    "begin_run",
    "claimed",
    "copy_job",
    "digest",
    "end_run",
    "is_abandoned",
    "keep_evaluations",
    "load_run",
    "load_summary",
    "locked",
    "making",
    "now",
    "open_regular",
    "parse_json",
    "read_bounded",
    "read_evaluations",
    "read_records",
    "record_files",
    "record_path",
    "replace_durably",
    "stamp",
    "summarise",
    "sync",
    "tensor_bytes",
    "write_durably",
    "write_summary",
    "writing",
]
