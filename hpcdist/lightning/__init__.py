"""Train with Lightning's Trainer, or Fabric, by any strategy of hpcdist::

    trainer = Trainer(strategy=hpcdist.lightning.HpcdistStrategy("gossip_pull"))

Ranks are those that mpirun or srun started; Lightning starts none. Lightning itself is imported on first use.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and checkers of types; see __getattr__
    from hpcdist.lightning.environment import HpcdistEnvironment
    from hpcdist.lightning.fabric import HpcdistFabricStrategy
    from hpcdist.lightning.trainer import HpcdistStrategy

__all__ = ["HpcdistEnvironment", "HpcdistFabricStrategy", "HpcdistStrategy"]

_HOMES = {"HpcdistEnvironment": "environment", "HpcdistFabricStrategy": "fabric", "HpcdistStrategy": "trainer"}


def __getattr__(name: str) -> Any:
    # Looked up on first use: Lightning takes seconds to import, Fabric's half of it fewer.
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcdist.lightning' has no attribute {name!r}")
    if importlib.util.find_spec("lightning") is None:
        raise ImportError(f"lightning must be installed for {name}; got none. Use `pip install hpcdist[lightning]`.")
    return getattr(importlib.import_module(f"hpcdist.lightning.{_HOMES[name]}"), name)
