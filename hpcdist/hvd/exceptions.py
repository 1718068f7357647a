"""Exceptions that scripts written for Horovod catch."""


class HorovodInternalError(RuntimeError):
    """A collective call has failed, on all ranks alike."""


class HostsUpdatedInterrupt(RuntimeError):
    """The ranks have changed, and none of the work is lost.

    Args:
        skip_sync: ranks have the same state already.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__()
        self.skip_sync = skip_sync
