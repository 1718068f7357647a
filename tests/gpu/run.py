"""Runs all that needs a GPU, each part within a limit of its own, and writes down what came of it: `tests/gpu.sh`.

Nothing but the standard library is imported here, so that what the machine lacks is told in the report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu import report

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL", "pytest-xdist": "xdist", "nvidia-ml-py": "pynvml"}  # else alike
UNUSED = {"matplotlib", "setuptools", "ruff", "mypy", "import-linter"}  # plots, and checks of the source
FRAMEWORKS = ["lightning", "transformers"]  # of features.py
QUICK = "not a_strategy or allreduce or parameter_server or gossip_pull"  # tests
RESERVE_S = 8.0  # for ending the last part and writing the report
TAIL = 4000  # characters of a part's output that are kept
LOOPS = HERE / "features.py"
MEASURED_S = 130.0  # what is left for measurements once Horovod is built
KILL_S = 3.0  # for a launcher to end its ranks


@dataclass
class Limits:
    """Hold the seconds that each part may take; all together less than the whole."""

    ranks: float = 40
    tests: float = 130
    tests_on_ranks: float = 60
    loops: float = 60
    steps: float = 75
    coding: float = 60
    messages: float = 40
    horovod_build: float = 400  # beside the tests
    horovod: float = 45


class Session:
    """Hold one run on one machine: its findings, and a file that has all of it after each part."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.start = options, time.monotonic()
        self.site = folder / "site"  # what the wheels bring
        self.folder = folder
        paths = [str(self.site / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self.environ = {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(self.site)])
        self.parts: list[dict] = []
        self.found: dict = {
            "machine": platform.node(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "device": options.device,
            "quick": options.quick,
            "parts": self.parts,
        }
        name = re.sub(r"[^\w.-]", "-", self.found["machine"]) or "machine"
        self.path = options.output / f"gpu-{name}"

    @property
    def left_s(self) -> float:
        return self.options.seconds - (time.monotonic() - self.start) - RESERVE_S

    def command(self, *arguments: str | Path, ranks: int = 0) -> list[str]:
        """Make the command `python *arguments`, on so many ranks; without a launcher for 0."""
        launched = [self.found["launcher"], "-n", str(ranks)] if ranks else []
        return [*launched, sys.executable, *map(str, arguments)]

    def run(self, name: str, command: Sequence[str], limit_s: float) -> dict:
        """Run a part to its end, or to its limit; return its result."""
        limit_s = min(limit_s * (3 if self.options.quick else 1), self.left_s)  # other work may run beside a check
        if limit_s < 2:
            return self.note(name, "skipped", "there is no time left")
        return self.end(name, self.start_case(name, command), time.monotonic(), limit_s)

    def start_case(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        print(f"==> {name}: {' '.join(command)}", flush=True)
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=self.environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def end(self, name: str, job: subprocess.Popen, start: float, limit_s: float) -> dict:
        try:
            status, state = job.wait(max(0.0, start + limit_s - time.monotonic())), "done"
        except subprocess.TimeoutExpired:
            _kill(job)
            status, state = job.returncode, "late"
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        if state == "done" and status:
            state = "failed"
        reason = {"done": "", "failed": f"exit status {status}", "late": f"took longer than {limit_s:.0f} s"}[state]
        return self.note(name, state, reason, seconds=time.monotonic() - start, output=text[-TAIL:])

    def note(self, name: str, state: str, reason: str = "", **more) -> dict:
        """Add a part to the report, and write it."""
        part = {"name": name, "state": state, "reason": reason, "seconds": 0.0, "output": "", "rows": [], **more}
        self.parts.append(part)
        print(f"    {state}{': ' if reason else ''}{reason} ({part['seconds']:.1f} s)", flush=True)
        self.write()
        return part

    def write(self) -> None:
        self.found["seconds"] = round(time.monotonic() - self.start, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_name(self.path.name + ".json").write_text(json.dumps(self.found, indent=1) + "\n")
        self.path.with_name(self.path.name + ".md").write_text(report.markdown(self.found))

    # --- measurements ---------------------------------------------------------------------------------------------
    def measure(self, name: str, limit_s: float, ranks: int, *, what: str = "") -> None:
        """Run a part that leaves rows, also where it then fails: those that it has measured by then."""
        out = self.folder / f"{name}.json"
        arguments = [HERE / "measure.py", what or name, out, "--device", self.options.device]
        part = self.run(name, self.command(*arguments, *["--quick"] * self.options.quick, ranks=ranks), limit_s)
        if out.exists():
            part.update(json.loads(out.read_text()))
        elif part["state"] == "done":
            part.update(state="failed", reason="it left no rows")
        self.write()


def _kill(job: subprocess.Popen) -> None:
    """End a part and all that it started, in whatever sessions."""
    family = _descendants(job.pid)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        job.terminate()  # a launcher that is killed would leave its ranks behind
        job.wait(KILL_S)
    for pid in (*family, job.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


# --- what the machine has ---------------------------------------------------------------------------------------------
def required() -> list[str]:
    """List the packages that hpcdist and its tests need, less those that nothing here uses."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|tools|test) = \[[^\n]*\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    entries = [entry for found in lists for entry in re.findall(r'"([^"]+)"', found)]
    names = [re.match(r"[\w-]+", entry)[0] for entry in entries if "python_version" not in entry]
    return [name for name in names if name not in UNUSED] + FRAMEWORKS


def missing(session: Session) -> list[str]:
    """List the packages among them that can't be imported here, wheels included."""
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in required()}
    code = (
        "import importlib.util, json, sys\n"
        f"print(json.dumps([n for n, m in {modules!r}.items() if importlib.util.find_spec(m) is None]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=session.environ, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 else [done.stderr.strip()[-200:]]


def take_wheels(session: Session, folder: Path) -> list[str]:
    """Unpack the wheels of packages that this Python lacks; return their names."""
    have = {_plain(found.metadata["Name"] or "") for found in importlib.metadata.distributions()}
    wheels = [path for path in sorted(folder.glob("*.whl")) if _plain(path.name.split("-")[0]) not in have]
    if not wheels:
        return []
    arguments = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--ignore-installed"]
    arguments += ["--prefix", str(session.site)]  # --target would leave out libraries, such as those of MPI
    session.run("wheels", [sys.executable, "-m", "pip", *arguments, *map(str, wheels)], 60)
    found = [str(path) for path in sorted(session.site.glob("**/*-packages")) if path.is_dir()]
    session.environ["PYTHONPATH"] = os.pathsep.join([session.environ["PYTHONPATH"], *found])
    if library := next(iter(sorted((session.site / "lib").glob("libmpi.so.*"))), None):  # MPI itself came as a wheel
        session.environ["MPI4PY_LIBMPI"] = str(library)
    return [path.name for path in wheels]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def probe(session: Session) -> dict:
    """Ask torch, MPI and CUDA about themselves."""
    done = session.run("environment", [sys.executable, str(HERE / "probe.py")], 60)
    lines = [line for line in done["output"].splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def find_launcher(session: Session) -> str:
    """Find the program that starts ranks of the MPI in use, which may be another's than that on PATH; or why none."""
    names = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.mpich")
    programs = dict.fromkeys(filter(None, (shutil.which(name, path=session.environ["PATH"]) for name in names)))
    code = "from mpi4py import MPI; c = MPI.COMM_WORLD; n = c.allreduce(1); c.rank or print('ranks', n)"
    for program in programs:
        session.found["launcher"] = program
        part = session.run("ranks", session.command("-c", code, ranks=2), Limits.ranks)
        if re.search(r"^ranks 2\b", part["output"], re.MULTILINE):
            return ""
        reason = part["reason"] or "it does not"
        part.update(state="failed", reason=f"{program} must start one world of 2 ranks; {reason}")
    session.found["launcher"] = None
    return "no launcher starts two ranks that find each other" if programs else "there is neither mpirun nor mpiexec"


# --- Horovod ----------------------------------------------------------------------------------------------------------
def why_no_horovod(session: Session) -> str:
    """Tell why Horovod with NCCL can't be built here."""
    environment = session.found["environment"]
    if session.options.device == "cpu":
        return "it is built by tests/run.sh on machines without a GPU"
    if not environment.get("nvcc"):
        return "there is no nvcc"
    if not environment.get("nccl"):
        return "this torch has no NCCL"
    if session.found["launcher"] is None:
        return "no launcher to prove it with"
    return "" if _source(session) else "there is no source package horovod-*.tar.gz in WHEELS"


def _source(session: Session) -> Path | None:
    folder = session.options.wheels
    return next(iter(sorted(folder.glob("horovod-*.tar.gz"))), None) if folder else None


def begin_horovod(session: Session) -> subprocess.Popen:
    """Build it beside the tests and measurements, which have some cores for themselves."""
    session.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(session.options.wheels)}
    jobs = max(1, len(os.sched_getaffinity(0)) - 4)
    build = ["-m", "hpcdist", "horovod", "build", "--no-install", "--gpu", "nccl", "--jobs", str(jobs)]
    build += ["--cache", str(session.folder / "horovod"), "--source", str(_source(session))]
    nice = ["nice", "-n", "19"] if shutil.which("nice") else []
    return session.start_case("horovod_build", [*nice, *session.command(*build)])


def end_horovod(session: Session, job: subprocess.Popen, start: float) -> bool:
    limit_s = min(Limits.horovod_build, time.monotonic() - start + session.left_s - MEASURED_S)
    session.end("horovod_build", job, start, limit_s)
    wheel = next(iter(sorted((session.folder / "horovod").glob("*/*.whl"))), None)
    if wheel is None:  # the log says why
        for log in (session.folder / "horovod").glob("*.log"):
            shutil.copy(log, session.path.with_name(f"{session.path.name}-horovod.log"))
        return False
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(session.site)
    return True


# --- all of it --------------------------------------------------------------------------------------------------------
def run(session: Session) -> None:
    options = session.options
    session.found["wheels"] = take_wheels(session, options.wheels) if options.wheels else []
    session.found["missing"] = missing(session)
    session.found["environment"] = probe(session)
    gpus = len(session.found["environment"].get("gpus", []))
    if options.device == "auto":
        options.device = session.found["device"] = "cuda" if gpus else "cpu"
    gpus *= options.device == "cuda"
    no_ranks = find_launcher(session)
    reason, building, start = why_no_horovod(session), None, time.monotonic()
    if not reason:
        building = begin_horovod(session)
    run_tests(session, no_ranks, gpus)
    no_horovod = no_ranks
    if building is None:
        session.note("horovod_build", "skipped", reason)
    elif not end_horovod(session, building, start):
        no_horovod = "its build did not end well"
    measure_all(session, no_ranks, no_horovod, gpus)


def run_tests(session: Session, no_ranks: str, gpus: int) -> None:
    """Run tests in one process, and on ranks that share a GPU, or have one each."""
    limits = Limits()
    tests = ["-m", "pytest", "-m", "gpu", "-q", "--color=no", "-p", "no:cacheprovider"]
    tests += ["--gpu-as", session.options.device]
    tests += [HERE, "-k", QUICK] if session.options.quick else [ROOT / "tests"]
    session.run("tests", session.command(*tests), limits.tests)
    parts = {"tests_on_ranks": (limits.tests_on_ranks, tests, 2), "loops": (limits.loops, [LOOPS], _ranks(gpus))}
    if gpus == 1:
        parts["loops_on_one_rank"] = limits.loops, [LOOPS], 1  # where NCCL can take part
    for name, (limit_s, arguments, ranks) in parts.items():
        if no_ranks:
            session.note(name, "skipped", no_ranks)
        else:
            session.run(name, session.command(*arguments, ranks=ranks), limit_s)


def measure_all(session: Session, no_ranks: str, no_horovod: str, gpus: int) -> None:
    """Measure, while nothing else runs here."""
    limits, ranks = Limits(), _ranks(gpus)
    for name, limit_s, size in (("steps", limits.steps, ranks), ("messages", limits.messages, 2)):
        if no_ranks:
            session.note(name, "skipped", no_ranks)
        else:
            session.measure(name, limit_s, size)
    if gpus == 1:
        session.measure("steps_on_one_rank", limits.steps / 3, 0, what="steps")
    session.measure("coding", limits.coding, 0)
    if no_horovod:
        session.note("horovod", "skipped", no_horovod)
    else:
        session.measure("horovod", limits.horovod, max(1, min(ranks, gpus)) if gpus else ranks)


def _ranks(gpus: int) -> int:
    return max(2, min(4, gpus))


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and measures on this machine's GPUs.")
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="folder for the two files")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: to check this script")
    options = parser.parse_args()
    options.output = options.output.absolute()
    options.wheels = options.wheels.absolute() if options.wheels else None
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        session = Session(options, Path(folder))
        try:
            run(session)
        except Exception as error:  # what has been measured is worth keeping
            session.note("script", "failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            session.write()
    print(f"==> {session.path}.md, {session.path}.json ({session.found['seconds']:.0f} s)")
    return 1 if any(part["state"] in ("failed", "late") for part in session.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
