"""Everything that hpcdist raises, as one tree::

    HpcdistError
     ├── ConfigError (ValueError)        a setting breaks a rule: which, the rule, the value, what to do
     │    └── UnknownNameError           no strategy, collective, option... of that name; lists the known ones
     ├── WorldError                      launched wrongly: N worlds of size 1 instead of one of size N
     ├── QueueError                      Slurm is not there, does not know a job, or refuses
     ├── MismatchError                   ranks disagree on versions, configuration or model
     ├── CommunicationError              a transfer can't be done or has failed
     │    ├── DeadlineError (TimeoutError)   waited past the deadline: who, for whom, where, how long
     │    ├── DeadlockError              virtual ranks all wait: what each one waits for
     │    └── RankFailedError            a transfer needs a rank that has died; the others may go on without it
     ├── DataError                       a data file is missing, truncated, corrupt or of another format
     ├── BuildError                      Horovod can't be built here: which part failed, and what to do
     ├── CheckpointError                 a checkpoint is missing, corrupt or of another model or strategy
     └── NonFiniteError (ArithmeticError)    a NaN or infinite gradient: rank, parameter, step
"""

from __future__ import annotations

from collections.abc import Iterable


class HpcdistError(Exception):
    """Base of all errors of hpcdist."""


class ConfigError(HpcdistError, ValueError):
    """A setting breaks a rule. The message reads `<setting> must be <rule>; got <value>. <what to do>`."""


class UnknownNameError(ConfigError):
    """A name that nothing answers to. `what` is the kind of thing, `known` the names that exist."""

    def __init__(self, what: str, name: str, known: Iterable[str]):
        super().__init__(f"{what} must be one of {', '.join(sorted(known))}; got {name!r}.")


class WorldError(HpcdistError, RuntimeError):
    """The launcher and MPI disagree on the number of ranks."""


class QueueError(HpcdistError, RuntimeError):
    """Slurm is not there, does not know a job, or refuses to do something; its words are in the message."""


class MismatchError(HpcdistError, RuntimeError):
    """Ranks that must agree (versions, configuration, model) do not."""


class CommunicationError(HpcdistError, RuntimeError):
    """A transfer between ranks can't be done or has failed."""


class DeadlineError(CommunicationError, TimeoutError):
    """A rank waited past the deadline for something that another one had to do."""


class DeadlockError(CommunicationError):
    """Every virtual rank waits for another one; the message says what each waits for."""


class RankFailedError(CommunicationError):
    """A rank that a transfer needs has died, where the launcher lets the others live."""


class DataError(HpcdistError, ValueError):
    """A data file is missing, truncated, corrupt or not of the expected format."""


class BuildError(HpcdistError, RuntimeError):
    """Horovod can't be built, or what was built does not work. The message begins with the part that failed."""


class CheckpointError(HpcdistError, ValueError):
    """A checkpoint is missing, corrupt, or belongs to another model or strategy."""


class NonFiniteError(HpcdistError, ArithmeticError):
    """A gradient holds NaN or infinity; the message names rank, parameter and step."""
