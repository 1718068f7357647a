"""Guard methods that an optimiser has in addition to torch's: run them where its state is, or refuse them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hpcdist.session import rules
from hpcdist.session.consistency import follow_servers
from hpcdist.session.world import current


def guarded_methods(cls: type, usual: type) -> dict[str, Callable[..., Any]]:
    """Return guards, by name, for the methods that torch's optimisers lack, such as schedulefree's `eval`.

    If servers run the updates, a call is collective, and copies the servers' parameters to every rank's model.

    Args:
        cls: the class of the optimiser.
        usual: a class with the methods that need no guard.
    """
    guards: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        public = {name: value for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"}
        guards |= {name: _guarded(name, value) for name, value in public.items() if not hasattr(usual, name)}
    return guards


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer.attachment.running:  # called by the plain optimiser's step
            return method(optimizer, *args, **kwargs)
        _require_effective(optimizer, name)
        with optimizer.attachment.run_local():
            result = method(optimizer, *args, **kwargs)
        follow_servers(optimizer, f"at optimizer.{name}()")
        return result

    return guarded


def _require_effective(optimizer: Any, method: str) -> None:
    """Raise ConfigError if an optimiser's method would change parameters that are not evaluated or saved.

    Outside of the loop servers call it too, on their parameters and state.
    """
    strategy = optimizer.strategy
    facts: dict[str, Any] = {"method": method, "optimizer": type(optimizer).__name__}
    if strategy.model.is_swapped:
        raise rules.error("an additional method of the optimiser is called in an evaluation", **facts)
    rules.refuse("an additional method of the optimiser is called", strategy, **facts)
    if current().loader is not None:
        rules.refuse("an additional method of the optimiser is called in the loop", strategy, **facts)
