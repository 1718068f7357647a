"""Find torch's classes by name, check their options and call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hpcdist.errors import ConfigError, suggestion


def subclasses(module: Any, base: type) -> dict[str, type]:
    """Return the public classes of a module that are derived from `base`, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


def check_options(where: str, algorithm: type, options: Iterable[str]) -> None:
    """Raise ConfigError where an option is not a parameter of the class."""
    reserved = ("self", "params", "optimizer", "schedulers")  # parameters that the user does not give
    known = [name for name in inspect.signature(algorithm.__init__).parameters if name not in reserved]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{where} option must be one of {', '.join(sorted(known))} for {algorithm.__name__}; got {option!r}."
                f"{suggestion(option, known)}"
            )


def call(where: str, algorithm: Callable[..., Any], target: Any, options: dict[str, Any], shown: Any = None) -> Any:
    """Call `algorithm(target, **options)`. Raise ConfigError where torch refuses.

    Args:
        shown: the options that the message shows, if others than `options`.
    """
    try:
        return algorithm(target, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        given = options if shown is None else shown
        raise ConfigError(
            f"{where} options must suit torch's {algorithm.__name__}; got {given} ({error}). See torch's reference."
        ) from None
