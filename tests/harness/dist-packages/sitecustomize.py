"""Python reads this at the start of every process of a job that a test launches.

Such a process has a fork of another one do its work, see `handover.py`, or else does without torch's compiler.

An optimiser's first step imports `torch._dynamo`, only to tell a compiler that is not at work where a graph ends. That
takes 1.2 s, nearly half of what a rank of a small job needs, and the tests launch some hundred jobs. So a module with
what is called then, and as a process group starts, stands for it. Whoever needs more of it is told so: see `launch`.
"""

from __future__ import annotations

import os
import sys
import types

if address := os.environ.pop("FORKSERVER", ""):  # processes that the fork starts begin as ever
    import handover

    handover.hand_over(address)

NAME = "torch._dynamo"


class Compiler(types.ModuleType):
    """What `torch._dynamo` is to a program that compiles nothing."""

    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)  # a process group starts: no rule is kept

    @staticmethod
    def graph_break() -> None:
        """Do nothing: no graph is being recorded."""

    @staticmethod
    def disable(function, *args, **more):
        """Return the function, which nobody compiles."""
        return function

    def __getattr__(self, name: str):
        raise AttributeError(f"{NAME}.{name} is not there in this test's job: pass compiler=True to `launch`.")


if "TORCH_COMPILER" not in os.environ:
    sys.modules[NAME] = Compiler(NAME)
