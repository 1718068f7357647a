"""`python -m hpcdist.hvd train.py ...`: runs an unchanged script that imports horovod.torch on hpcdist."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdist.errors import ConfigError

NAMES = {  # Horovod's modules, and hpcdist's replacements
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


INTERFACE = "0.28.1"  # the version of Horovod that has this interface


def run(*_: Any, **__: Any) -> None:
    """Refuse to start ranks, unlike horovod.run: always raises ConfigError."""
    raise ConfigError(
        "horovod.run must not be called here, because mpirun or srun starts the ranks; got a call. Start the script as "
        "`mpirun -n 4 python -m hpcdist.hvd train.py`, without the option that makes it call horovod.run."
    )


def install_modules() -> None:
    """Register hpcdist's modules under the names of Horovod's, for `import horovod.torch`."""
    for name in ("horovod", "horovod.common"):
        package = sys.modules[name] = ModuleType(name, f"{name}, implemented by hpcdist.")
        package.__path__ = []  # so it is a package, from which Python imports submodules
    for name, replacement in NAMES.items():
        module = sys.modules[name] = importlib.import_module(replacement)
        parent, _, attribute = name.rpartition(".")
        if parent in ("horovod", "horovod.common"):
            setattr(sys.modules[parent], attribute, module)
    vars(sys.modules["horovod"]).update(common=sys.modules["horovod.common"], run=run, __version__=INTERFACE)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(
            "python -m hpcdist.hvd must be given a script; got none. Start it as "
            "`mpirun -n 4 python -m hpcdist.hvd train.py`."
        )
    install_modules()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as with `python train.py`
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
