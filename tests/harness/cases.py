"""Cases that are tried one after the other inside one test, where a test for each would cost more than the case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(name: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Decorate a test so that it runs with each value of the argument `name`; a failure names the value.

    As `pytest.mark.parametrize`, but fixtures are made once for all values, and a skip ends them all.
    """
    values = list(values)

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            for value in values:
                try:
                    test(*args, **kwargs, **{name: value})
                except BaseException as error:
                    if hasattr(error, "add_note"):  # from Python 3.11 on
                        error.add_note(f"with {name} = {value!r}")
                    raise

        signature = inspect.signature(test)
        kept = [parameter for key, parameter in signature.parameters.items() if key != name]
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate
