"""What a run leaves behind: step records as JSON lines per rank, the staleness ledger, and `summary.json`."""

from hpcdist.records.digest import digest, tensor_bytes
from hpcdist.records.durable import Stamp, replace_durably, stamp, sync, write_durably
from hpcdist.records.staleness import StalenessLedger
from hpcdist.records.step import RecordWriter, StepRecord, read_records, record_path
from hpcdist.records.summary import Seconds, Staleness, Summary, load_summary, summarise, write_summary

__all__ = [
    "RecordWriter",
    "Seconds",
    "Staleness",
    "StalenessLedger",
    "Stamp",
    "StepRecord",
    "Summary",
    "digest",
    "load_summary",
    "read_records",
    "record_path",
    "replace_durably",
    "stamp",
    "summarise",
    "sync",
    "tensor_bytes",
    "write_durably",
    "write_summary",
]
