"""Writing past pytest's capture of output."""

from __future__ import annotations

import os


class Console:
    """The standard error that the process was started with. Made while pytest does not capture output."""

    label = ""  # put before every line

    def __init__(self) -> None:
        self.fd = os.dup(2)

    def write(self, text: str) -> None:
        """Writes all lines in one piece, so that those of several ranks do not mix."""
        data = "".join(f"{self.label}{line}\n" for line in text.splitlines()).encode()
        while data:
            data = data[os.write(self.fd, data) :]
