"""Check options against the signature of the function that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import create_model

from hpcdist.config.settings import Settings


def checked_options(function: Callable[..., Any], given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Check the options of a function, its keyword-only arguments, and return them with the defaults.

    Args:
        where: the dotted key of the options' table, for messages.

    Raises:
        ConfigError: an option is unknown, missing or of another type.
    """
    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {
        p.name: (hints[p.name], ... if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    return create_model("Options", __base__=Settings, **fields).from_mapping(given, where).model_dump()
