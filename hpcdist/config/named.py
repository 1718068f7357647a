"""A table that chooses an algorithm by name, and holds that algorithm's own options beside it."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, model_validator

from hpcdist.config.settings import Settings


class Named(Settings):
    """An algorithm's `name`, or `path/to/file.py:Class`, with that algorithm's options beside it.

    A string alone is the name.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """Return the algorithm's options."""
        return dict(self.model_extra or {})
