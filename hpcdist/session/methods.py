"""Guard the methods that an optimiser has beside torch's: they run where its state is, or are refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hpcdist.session import rules
from hpcdist.session.consistency import follow_servers
from hpcdist.session.world import current


def guarded_methods(cls: type, usual: type) -> dict[str, Callable[..., Any]]:
    """Return the methods that torch's optimisers lack, such as schedulefree's `eval`, by name: refused where needed.

    Where servers make the updates a call is collective, and leaves every rank's model as the servers have it.

    Args:
        cls: the class of the optimiser.
        usual: has the methods that need no guard.
    """
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        public = {name: value for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"}
        found |= {name: _guarded(name, value) for name, value in public.items() if not hasattr(usual, name)}
    return found


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer.attachment.running:  # the optimiser's own step calls it
            return method(optimizer, *args, **kwargs)
        _require_effective(optimizer, name)
        with optimizer.attachment.run_own():
            result = method(optimizer, *args, **kwargs)
        follow_servers(optimizer, f"at optimizer.{name}()")
        return result

    return guarded


def _require_effective(optimizer: Any, method: str) -> None:
    """Raise ConfigError where a method of the optimiser's own would change parameters that nobody evaluates or saves.

    Outside of the loop, servers run the same lines, and change the parameters and the state that they have.
    """
    strategy = optimizer.strategy
    facts: dict[str, Any] = {"method": method, "optimizer": type(optimizer).__name__}
    if strategy.model.is_swapped:
        raise rules.error("a method of the optimiser's own is called in an evaluation", **facts)
    rules.refuse("a method of the optimiser's own is called", strategy, **facts)
    if current().loader is not None:
        rules.refuse("a method of the optimiser's own is called in the loop", strategy, **facts)
