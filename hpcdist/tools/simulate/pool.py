"""Processes beside this one, which make runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Processes:
    """Processes with one thread of torch each, which call functions.

    Signals that end a program are this process's business alone, which closes the others then: a terminal sends Ctrl-C
    to all of them, and each would print a traceback. They also end if this process is killed.
    """

    def __init__(self, workers: int):
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks
        self._pool = ProcessPoolExecutor(workers, context, initializer=_begin)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Let the next free process call a function. Threads may share this."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # processes that begin here inherit it
        try:
            return self._pool.submit(work, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the processes at once. Calls that are under way fail with BrokenProcessPool."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def _begin() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
