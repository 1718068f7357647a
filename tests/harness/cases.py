"""Cases that are tried one after the other inside one test, where a test for each would cost more than the case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

chosen = ""  # what `pytest -k` was given


def each(name: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Decorate a test so that it runs with each value of the argument `name`; a failure names the value.

    As `pytest.mark.parametrize`, but fixtures are made once for all values, and a skip ends them all. `pytest -k WORD`
    selects tests with a value, or a part of a value that is a tuple, in which the word is; they run with such values.
    """
    values = list(values)
    words = [_words(value) for value in values]

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            fitting = [value for value, own in zip(values, words, strict=True) if chosen and chosen in " ".join(own)]
            for value in fitting or values:
                try:
                    test(*args, **kwargs, **{name: value})
                except BaseException as error:
                    if hasattr(error, "add_note"):  # from Python 3.11 on
                        error.add_note(f"with {name} = {value!r}")
                    raise

        signature = inspect.signature(test)
        kept = [parameter for key, parameter in signature.parameters.items() if key != name]
        run.__signature__ = signature.replace(parameters=kept)
        vars(run).update(dict.fromkeys((word for own in words for word in own), True))  # where -k looks
        return run

    return decorate


def _words(value: Any) -> list[str]:
    """The text in a value, in lower case."""
    if isinstance(value, tuple):
        return [word for part in value for word in _words(part)]
    return [value.lower()] if isinstance(value, str) and value else []
