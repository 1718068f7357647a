"""The files of a run: `run.json`, step records per rank, `evaluations.jsonl`, `summary.json`."""

from hpcdist.records.digest import digest, tensor_bytes
from hpcdist.records.files import (
    CHECKSUMS,
    Stamp,
    open_regular,
    parse_json,
    read_bounded,
    read_checked,
    replace_durably,
    replacing,
    stamp,
    sync,
    write_durably,
    writing,
)
from hpcdist.records.lock import is_abandoned, locked, making
from hpcdist.records.resources import Resources, Sampler, Usage, resources_path
from hpcdist.records.run import (
    JobFile,
    Outcome,
    RunRecord,
    Start,
    copy_job,
    cores_by_host,
    end_run,
    load_average,
    load_run,
    local_cores_of_host,
    now,
    record_first_step,
    start_run,
)
from hpcdist.records.step import (
    Evaluation,
    RecordTail,
    RecordWriter,
    StepRecord,
    append_evaluation,
    continue_records,
    drop_partial_line,
    keep_evaluations,
    read_evaluations,
    read_records,
    record_files,
    record_path,
)
from hpcdist.records.summary import Seconds, Staleness, Summary, load_summary, summarise, write_summary
