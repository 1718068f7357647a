"""Exceptions that scripts written for Horovod catch."""


class HorovodInternalError(RuntimeError):
    """A collective call has failed, on all ranks."""


class HostsUpdatedInterrupt(RuntimeError):
    """The group of ranks has changed, without loss of work; with `skip_sync` ranks have equal states already."""

    def __init__(self, skip_sync: bool = False):
        super().__init__()
        self.skip_sync = skip_sync
