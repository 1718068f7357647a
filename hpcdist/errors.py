"""All exceptions of hpcdist, as one tree::

HpcdistError
 ├── ConfigError (ValueError)        a setting breaks a rule: its name, the rule, the value, what to do
 │    └── UnknownNameError           no strategy, collective, option... has this name; lists the known names
 ├── WorldError                      launched wrongly: N worlds of size 1 instead of one of size N
 ├── QueueError                      Slurm is not there, does not know a job, or refuses
 ├── MismatchError                   ranks disagree on versions, configuration or model
 ├── CommunicationError              a transfer can't be done or has failed
 │    ├── DeadlineError (TimeoutError)   a wait past the deadline: which rank, for which rank, where, how long
 │    ├── DeadlockError              all virtual ranks wait: each one's reason
 │    └── RankFailedError            a transfer needs a rank that has died; the others may continue without it
 ├── DataError                       a data file is missing, truncated, corrupt or of another format
 ├── OutputError (OSError)           a file of a run or of a data set can't be written: a full disk, a quota...
 ├── BuildError                      Horovod can't be built: the part that failed, and what to do
 ├── RunError                        a run of a comparison has failed: its last lines
 ├── CheckpointError                 a checkpoint is missing, corrupt or of another model or strategy
 └── NonFiniteError (ArithmeticError)    a NaN or infinite gradient: rank, parameter, step
"""

from __future__ import annotations

import difflib
import errno
import os
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

LEFT = 75  # exit status of a run that stopped early and should be restarted: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # the shell's status for a process that SIGINT ended
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError; EFBIG: a limit on the size of files, `ulimit -f`


class HpcdistError(Exception):
    """Base class of all exceptions of hpcdist.

    Attributes:
        on_other_rank: the error happened on another rank, which reports it.
    """

    on_other_rank = False


class ConfigError(HpcdistError, ValueError):
    """A setting breaks a rule. The message reads `<setting> must be <rule>; got <value>. <what to do>`."""


class UnknownNameError(ConfigError):
    """An unknown name. `what` is the setting that holds it, `known` the names that exist."""

    def __init__(self, what: str, name: str, known: Iterable[str]):
        known = sorted(known)
        super().__init__(f"{what} must be one of {', '.join(known)}; got {name!r}.{suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'period'?` if a known name is close, ignoring case; else an empty text."""
    lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" Did you mean {lower[close[0]]!r}?" if close else ""


class WorldError(HpcdistError, RuntimeError):
    """The launcher and MPI disagree on the number of ranks."""


class QueueError(HpcdistError, RuntimeError):
    """Slurm is not installed, does not know a job, or refuses a command; the message contains Slurm's message."""


class MismatchError(HpcdistError, RuntimeError):
    """Ranks that must agree (versions, configuration, model) do not."""


class CommunicationError(HpcdistError, RuntimeError):
    """A transfer between ranks can't be done or has failed."""


class DeadlineError(CommunicationError, TimeoutError):
    """A rank waited past the deadline for an action of another rank."""


class DeadlockError(CommunicationError):
    """Every virtual rank waits for another one; the message describes each rank's wait."""


class RankFailedError(CommunicationError):
    """A rank that a transfer needs has died, in a job that tolerates deaths."""


class DataError(HpcdistError, ValueError):
    """A data file is missing, truncated, corrupt or not of the expected format."""


class OutputError(HpcdistError, OSError):
    """A file can't be written completely; the message names the file and the system's reason."""

    @classmethod
    def of(cls, path: object, error: OSError) -> OutputError:
        """Return the error for a file `path` that the system refuses to write."""
        if error.errno not in NO_SPACE:
            return cls(f"{path} must be written; got {error.strerror or str(error)!r}. Write elsewhere.")
        return cls(
            f"{path} must be written to its end; got {os.strerror(error.errno)!r}. Make room (disk, quota, limit on "
            "the size of files), or write elsewhere; a run continues from its last checkpoint with --resume."
        )


class BuildError(HpcdistError, RuntimeError):
    """Horovod can't be built, or the build does not work. The message starts with the part that failed."""


class RunError(HpcdistError, RuntimeError):
    """A run of a comparison has failed; the message ends with the run's last lines."""


class CheckpointError(HpcdistError, ValueError):
    """A checkpoint is missing, corrupt, or belongs to another model or strategy."""


class NonFiniteError(HpcdistError, ArithmeticError):
    """A gradient contains NaN or infinity; the message names rank, parameter and step."""


def place(error: BaseException) -> str:
    """Return ` (FILE:LINE)`, the innermost line of the user's code in an exception's traceback; empty if none."""
    if isinstance(error, SyntaxError):  # its text names them
        return ""
    not_users = (os.path.dirname(__file__) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        installed = "site-packages" in frame.filename or "dist-packages" in frame.filename
        generated = (frame.filename, frame.name) == ("<string>", "__init__")  # by dataclasses
        if not installed and not generated and not frame.filename.startswith(not_users):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def require_packages(what: str, extra: str, *modules: str) -> None:
    """Raise ConfigError if modules that `what` needs are not installed; the message names hpcdist's extra with them."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{what} must have the packages of the extra {extra}; got no module {', '.join(missing)}. Run: "
            f"pip install 'hpcdist[{extra}]'"
        )


def refuse_former(cls: type, former: Mapping[str, str]) -> None:
    """Raise ConfigError if a class defines an obsolete name: a key of `former`, whose value says what to write."""
    for name, instead in former.items():
        if name in vars(cls):
            raise ConfigError(f"{cls.__name__} must not define {name!r}, which nothing calls; write: {instead}")
