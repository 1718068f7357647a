"""Options of what is chosen by name, checked against the signature of the function that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import create_model

from hpcdist.config.settings import Settings


def checked_options(function: Callable[..., Any], given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The keyword-only options of a function, defaults included. Raises ConfigError; `where` is the table's key."""
    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {
        p.name: (hints[p.name], ... if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    return create_model("Options", __base__=Settings, **fields).from_mapping(given, where).model_dump()
