"""One verdict for all ranks: a test passes where it passes on every rank, and rank 0 tells what happened elsewhere."""

from __future__ import annotations

import traceback
from collections.abc import Generator

import pytest

from harness import job as jobs
from harness.job import Job
from harness.ranks import is_echo

Report = pytest.TestReport


class Verdict:
    """A pytest plugin for runs under a launcher. Its hooks are collective."""

    def __init__(self, config: pytest.Config, job: Job):
        self._config, self._job, self._collect_errors = config, job, []

    # --- collection -----------------------------------------------------------------------------------------------
    def pytest_report_header(self) -> str:
        return f"ranks: {self._job.size} of {self._job.library}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collect_errors.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Raises Interrupted unless all ranks have collected the same tests, or have failed to in the same places."""
        self._job.meet("after collection")
        found = self._job.gather(([item.nodeid for item in session.items], self._collect_errors))
        for rank, (tests, errors) in enumerate(found):
            if len(errors) > len(found[0][1]):
                raise session.Interrupted(f"collection failed on rank {rank}:\n" + "\n".join(errors))
            if tests != found[0][0]:
                other = [test for test in tests if test not in found[0][0]] or ["(the same ones in another order)"]
                raise session.Interrupted(
                    f"every rank must collect the same tests; rank 0 has {len(found[0][0])} and rank {rank} has "
                    f"{len(tests)}, among them {other[0]}. Parameters must not depend on rank, time or a set's order."
                )

    # --- tests ----------------------------------------------------------------------------------------------------
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Not collective. Lets ranks that a test does not use wait at its verdict: they count as having run it."""
        return True if self._is_away(pyfuncitem) else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Report, Report]:
        report = yield
        part = jobs.SKIPPED if report.skipped else jobs.PASSED
        if call.when == "call" and self._is_away(item):
            part = jobs.AWAY
        if report.failed:
            part = jobs.ECHOED if call.excinfo and is_echo(call.excinfo.value) else jobs.FAILED
        failure = f"{item.nodeid}\n{report.longreprtext}" if part == jobs.FAILED else ""
        parts = self._job.meet(f"after {call.when} of {item.nodeid}", part, failure)
        if len(set(parts) - {jobs.AWAY}) > 1 or max(parts) > jobs.SKIPPED:
            return self._agree(report, parts)
        return report

    def _agree(self, report: Report, parts: list[int]) -> Report:
        """Collective. The failed report of a test that some rank did not pass or skip."""
        own = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        found = self._job.gather((own, _summary(report)))
        worst, rank = max(parts), self._job.rank
        ranks = [r for r, part in enumerate(parts) if part == worst]
        if worst == jobs.SKIPPED:
            reasons = [
                f"rank {r}: {summary or 'passed'}" for r, (_, summary) in enumerate(found) if parts[r] != jobs.AWAY
            ]
            report.longrepr = "\n".join(["every rank must skip a test or none:", *reasons])
        elif rank == 0 or rank in ranks:
            if rank == 0 and rank not in ranks:
                data = found[ranks[0]][0]
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            _label(report, ranks, [found[r][1] for r in ranks], self._job.size)
        else:
            report.longrepr = f"failed on rank {ranks[0]}"
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
        return report

    def _is_away(self, item: pytest.Item) -> bool:
        """Whether a test runs on fewer ranks of the job, without this one."""
        size = item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
        return size is not None and self._job.rank >= size

    # --- ends -----------------------------------------------------------------------------------------------------
    def pytest_internalerror(self, excrepr: object) -> None:
        self._job.end(f"pytest failed:\n{excrepr}", pytest.ExitCode.INTERNAL_ERROR)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # that one has been agreed on
            text = "".join(traceback.format_exception_only(excinfo.type, excinfo.value))
            self._job.end(f"interrupted: {text}", pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._job.meet("at the end")  # a launcher may end all ranks when the first one leaves with a failure


def _summary(report: Report) -> str:
    """What happened to a test, in one line: the last of its traceback, or why it was skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return f"skipped: {report.longrepr[2]}"
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
    return text.partition("\n")[0]


def _label(report: Report, ranks: list[int], summaries: list[str], size: int) -> None:
    """Says on which ranks a test failed, and how where it failed in another way than on the first of them."""
    lines = [f"failed on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}; shown is rank {ranks[0]}"]
    lines += [f"rank {r}: {text}" for r, text in zip(ranks, summaries, strict=True) if text != summaries[0]]
    report.sections.insert(0, ("Ranks", "\n".join(lines)))
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        crash.message = f"[rank {ranks[0]}] {crash.message}"
