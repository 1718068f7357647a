"""`python -m hpcdist.hvd train.py ...`: runs a script whose imports say horovod.torch on hpcdist, as it is."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdist.errors import ConfigError

NAMES = {  # of Horovod's modules, by hpcdist's
    "horovod.torch": "hpcdist.hvd",
    "horovod.torch.mpi_ops": "hpcdist.hvd.operations",
    "horovod.torch.compression": "hpcdist.hvd.compression",
    "horovod.torch.functions": "hpcdist.hvd.functions",
    "horovod.torch.optimizer": "hpcdist.hvd.optimizer",
    "horovod.torch.sync_batch_norm": "hpcdist.hvd.sync_batch_norm",
    "horovod.torch.elastic": "hpcdist.hvd.elastic",
    "horovod.torch.elastic.state": "hpcdist.hvd.elastic",
    "horovod.torch.elastic.sampler": "hpcdist.hvd.elastic",
    "horovod.common.elastic": "hpcdist.hvd.elastic",
    "horovod.common.exceptions": "hpcdist.hvd.exceptions",
    "horovod.common.process_sets": "hpcdist.hvd.state",
}


INTERFACE = "0.28.1"  # the version of Horovod whose interface this is


def run(*_: Any, **__: Any) -> None:
    """Refuse to start ranks, as horovod.run does.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "horovod.run must not be called here, where mpirun or srun starts the ranks; got a call. Start the script as "
        "`mpirun -n 4 python -m hpcdist.hvd train.py`, without the option that makes it call horovod.run."
    )


def stand_in() -> None:
    """Let imports of Horovod's modules find hpcdist's."""
    for name in ("horovod", "horovod.common"):
        package = sys.modules[name] = ModuleType(name, f"{name}, as hpcdist has it.")
        package.__path__ = []  # has modules
    for name, ours in NAMES.items():
        found = sys.modules[name] = importlib.import_module(ours)
        parent, _, own = name.rpartition(".")
        if parent in ("horovod", "horovod.common"):
            setattr(sys.modules[parent], own, found)
    vars(sys.modules["horovod"]).update(common=sys.modules["horovod.common"], run=run, __version__=INTERFACE)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(
            "python -m hpcdist.hvd must be given a script; got none. Start it as "
            "`mpirun -n 4 python -m hpcdist.hvd train.py`."
        )
    stand_in()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as `python train.py` has it
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
