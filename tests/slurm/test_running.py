"""What scripts do when bash runs them: signals, requeueing, the doctor, spare nodes, where ranks meet."""

from __future__ import annotations

import signal
import time

from harness.cases import each
from harness.launch import wait_until
from hpcdist.tools.slurm.spec import Site
from slurm.fakes import RUN_IT, payload, script

LEAVES = 'trap "exit 75" USR1; touch up; while :; do sleep 0.02; done'  # a launcher whose ranks save and leave
CLEANS_UP = 'trap "sleep 0.2; exit 75" USR1; touch up; while :; do sleep 0.02; done'


def requeued(bash) -> bool:
    return ["requeue", "4711"] in [arguments for name, arguments, _ in bash.calls() if name == "scontrol"]


@each("status", [0, 75, 137])
def test_the_jobs_status_is_the_runs_and_only_75_is_requeued(bash, status):
    job = "JobId=4711 PreemptEligibleTime=2026-01-01T10:00:00 PreemptTime=None Deadline=N/A"
    assert bash.run(script(), ON_LAUNCH=f"exit {status}", JOB=job)[0] == status
    assert requeued(bash) == (status == 75)
    assert bash.run(script(requeue=False), ON_LAUNCH=f"exit {status}")[0] == status
    assert not requeued(bash)


@each("status", [14, 75])
@each("reason", [
    {"ON_PROBE": "exit 1"},  # a host does not answer
    {"JOB": "JobId=4711 PreemptEligibleTime=2026-01-01T10:00:00 PreemptTime=2026-01-02T10:00:00 Deadline=N/A"},
])  # fmt: skip
def test_a_run_that_a_dead_node_or_preemption_has_ended_is_requeued(bash, status, reason):
    assert bash.run(script(), ON_LAUNCH=f"exit {status}", **reason)[0] == status
    assert requeued(bash)
    bash.run(script(), ON_LAUNCH=f"exit {status}", SLURM_RESTART_COUNT="20", **reason)
    assert requeued(bash) == (status == 75), "a failure that only looks like one must not come back for ever"
    bash.run(script(), ON_LAUNCH="kill -TERM $PPID; exit 14", **reason)
    assert not requeued(bash), "scancel must not be undone"


def test_mpirun_that_has_lost_a_node_without_saying_so(bash):
    found = script(Site(launcher="mpirun"))
    assert bash.run(found, ON_LAUNCH="exit 0", ON_PROBE="exit 1")[0] == 1
    assert requeued(bash)
    assert bash.run(found, ON_LAUNCH="touch runs/4711/summary.json", ON_PROBE="exit 1")[0] == 0
    assert not requeued(bash)


@each("case", [
    ("srun", [signal.SIGUSR1, signal.SIGUSR1]), ("srun", [signal.SIGTERM]), ("mpirun", [signal.SIGUSR1])
])  # fmt: skip
def test_a_signal_goes_on_to_the_launcher(bash, case):
    launcher, numbers = case
    (bash.folder / "up").unlink(missing_ok=True)
    process = bash.start(script(Site(launcher=launcher)), ON_LAUNCH=CLEANS_UP)
    wait_until((bash.folder / "up").exists)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)
    process.communicate(timeout=100)
    assert process.returncode == 75
    assert requeued(bash) == (signal.SIGTERM not in numbers), "scancel must not be undone"


def test_a_signal_during_the_doctor(bash):
    process = bash.start(script(doctor=True), ON_LAUNCH='case "$*" in *doctor*) ' + LEAVES + " ;; esac")
    wait_until((bash.folder / "up").exists)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=100)
    assert process.returncode == 75 and len(bash.launched()) == 1, "the run was not begun"


def test_ranks_say_which_cores_they_have(bash):
    found = script(job=None, command=["printf", "<%s>", "a b"], env={"HOSTILE": "x"})
    status, printed = bash.run(found, ON_LAUNCH=RUN_IT)
    assert status == 0 and "Cpus_allowed_list:\t" in printed and printed.endswith("<a b>")


def test_a_signal_before_a_rank_listens_does_no_harm(bash):
    code = "import os, signal as s; os.kill(os.getpid(), s.SIGUSR1); s.signal(s.SIGUSR1, lambda *_: print('heard'));"
    found = script(job=None, command=["python3", "-c", f"{code} os.kill(os.getpid(), s.SIGUSR1)"])
    status, printed = bash.run(found, ON_LAUNCH=RUN_IT)
    assert status == 0 and printed.endswith("\nheard\n")


def test_where_ranks_meet(bash):
    found = script(job=None, command=["bash", "-c", 'echo "$MASTER_ADDR:$MASTER_PORT $HPCDIST_RUN"'])
    assert bash.run(found, ON_LAUNCH=RUN_IT)[1].endswith("n1:14711 runs/4711\n")
    assert bash.run(found, ON_LAUNCH=RUN_IT, SLURM_JOB_ID="20003")[1].endswith("n1:10003 runs/20003\n")


def test_without_hosts_nothing_runs(bash):
    status, printed = bash.run(script(), HOSTS="")
    assert status == 1 and "scontrol must name the hosts of n[1-2]; got none." in printed and bash.launched() == []


@each(
    "case",
    [
        ("srun", ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--nodelist=n1,n2"]),
        ("mpirun", ["-n", "6", "--host", "n1:3,n2:3"]),
        ("mpiexec", ["-n", "6", "-ppn", "3", "-hosts", "n1,n2"]),
    ],
)
def test_where_ranks_go(bash, case):
    launcher, expected = case
    assert bash.run(script(Site(launcher=launcher), nodes=2, ranks_per_node=3))[0] == 0
    (arguments,) = bash.launched()
    assert arguments[: arguments.index("bash")][-len(expected) :] == expected


def test_the_doctor_comes_first_on_the_same_nodes(bash):
    assert bash.run(script(doctor=True, nodes=2))[0] == 0
    doctor, run = bash.launched()
    assert doctor[doctor.index("hpcdist") :] == ["hpcdist", "doctor", "--ranks", "2", "--folder", "runs/4711"]
    assert payload(run)[:2] == ["hpcdist", "train"]
    assert "--nodelist=n1,n2" in doctor and "--nodelist=n1,n2" in run
    assert bash.run(script(doctor=True), ON_LAUNCH="exit 1")[0] == 1
    assert len(bash.launched()) == 1 and not requeued(bash), "what it refuses does not run"
    assert bash.run(script(doctor=True, nodes=2, ranks_per_node=2, shape="allreduce"))[0] == 0
    assert bash.launched()[0][-5:] == ["--ranks", "4", "--folder", "runs/4711", "--gpus"]


BAD = 'while [ $# -gt 0 ]; do [ "$1" = --exclude-file ] && printf "%s" "$BAD" >"$2"; shift; done'


@each("case", [("", "n1,n2"), ("n1\n", "n2,n3"), ("n2\n", "n1,n3")])
def test_bad_nodes_are_left_out(bash, case):
    bad, left = case
    found = script(doctor=True, nodes=2, spare_nodes=1)
    assert bash.run(found, HOSTS="n1 n2 n3", ON_LAUNCH=BAD, BAD=bad)[0] == 0
    doctor, run = bash.launched()
    assert "--nodelist=n1,n2,n3" in doctor and f"--nodelist={left}" in run and "--nodes=2" in run


STATUS = 'case "$*" in *--exclude-file*) status=$ENDS ;; *doctor*) status=$AGAIN ;; esac'
CUT_SHORT = f"{STATUS}; {BAD}; exit ${{status-0}}"


def examined(bash, ends="1", again="0", bad="n2\n") -> tuple[int, list[list[str]]]:
    """A job with a node to spare whose first examination ends with that status; its own, and what it launched."""
    found = script(doctor=True, nodes=2, spare_nodes=1)
    status, _ = bash.run(found, HOSTS="n1 n2 n3", ON_LAUNCH=CUT_SHORT, BAD=bad, ENDS=ends, AGAIN=again)
    return status, bash.launched()


def test_after_an_examination_that_was_cut_short_those_that_remain_are_examined(bash):
    status, (first, second, run) = examined(bash)
    assert status == 0 and "--nodelist=n1,n2,n3" in first and first[-4:-2] == ["--spare", "1"]
    assert second[second.index("hpcdist") :] == ["hpcdist", "doctor", "--ranks", "2", "--folder", "runs/4711"]
    assert "--nodelist=n1,n3" in second and "--nodelist=n1,n3" in run and payload(run)[:2] == ["hpcdist", "train"]
    status, launched = examined(bash, again="3")
    assert status == 3 and len(launched) == 2 and not requeued(bash), "it refuses them again"


def test_nodes_that_an_earlier_attempt_left_out_are_not(bash):
    left = bash.folder / "runs" / "4711" / "excluded-hosts"
    left.parent.mkdir(parents=True)
    left.write_text("n1\n")
    status, launched = examined(bash, ends="4", bad="")
    assert status == 4 and len(launched) == 1


def test_too_few_good_nodes(bash):
    status, printed = bash.run(
        script(doctor=True, nodes=2, spare_nodes=1), HOSTS="n1 n2 n3", ON_LAUNCH=BAD, BAD="n1,n2\n"
    )
    assert status == 1 and "good hosts must be 2; got 1." in printed and len(bash.launched()) == 1


def test_software_that_is_missing_ends_the_job(bash):
    assert bash.run(script(Site(venv="nowhere")))[0] == 1 and bash.launched() == []
    (bash.folder / "bin" / "module").unlink()
    assert bash.run(script(Site(modules=["mpi"])))[0] == 127 and bash.launched() == []


def test_a_study_runs_the_tasks_case(bash):
    found = script(shape="study")
    assert bash.run(found, SLURM_ARRAY_TASK_ID="0")[0] == 0 and payload(bash.launched()[0])[-1] == "seed=1"
    assert bash.run(found, SLURM_ARRAY_TASK_ID="1")[0] == 0 and payload(bash.launched()[0])[-1] == "optimizer.lr=0.1"
    status, printed = bash.run(found, SLURM_ARRAY_TASK_ID="2")
    assert status == 1 and "the array's tasks must be 0 to 1; got 2." in printed


def test_an_interactive_run_begins_again_in_the_allocation(bash):
    found = script(shape="interactive", nodes=2)
    again = '[ "$name" != salloc ] || SLURM_JOB_ID=4711 bash "${@: -1}"'
    assert bash.run(found, SLURM_JOB_ID="", ON_LAUNCH=again)[0] == 0
    assert [name for name, _, _ in bash.calls()] == ["salloc", "scontrol", "srun"]
    assert payload(bash.launched()[0])[:2] == ["hpcdist", "train"]
    assert bash.run(script(shape="interactive", job=None))[0] == 0, "a shell on the first node"
    assert bash.launched() == [["--nodes=1", "--ntasks=1", "--overlap", "--pty", "bash"]]
