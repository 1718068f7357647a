"""`hpcdist checkpoint`: list a run's checkpoints, and export the model of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import command_group, writable
from hpcdist.tools.options import argument, option

app = command_group("checkpoint", "List a run's checkpoints; export the model of one.")

Run = Annotated[
    Path, argument("RUN", "Folder of a run, folder of checkpoints, or one checkpoint.", autocompletion=completion.runs)
]


@app.command("show")
def checkpoint_show(run: Run) -> None:
    """List the checkpoints of a run, the newest first, and check every file.

    The exit status is 1 if a checkpoint is damaged.

    Example: hpcdist checkpoint show runs/digits-allreduce-4-1
    """
    from hpcdist.checkpoint import survey

    checkpoints = survey(run)
    console.rows(
        None,
        [
            {
                "checkpoint": checkpoint.path.name,
                "step": checkpoint.step,
                "written": checkpoint.written.isoformat(" ", "minutes"),
                "ranks": checkpoint.ranks,
                "stages": checkpoint.stages,
                "MB": checkpoint.n_bytes / 1e6,
                "hpcdist": checkpoint.version,
                "files": "damaged" if checkpoint.damage else "whole",
            }
            for checkpoint in checkpoints
        ],
    )
    damages = [checkpoint.damage for checkpoint in checkpoints if checkpoint.damage]
    for damage in damages:
        console.note(damage)
    if damages:
        raise typer.Exit(1)


@app.command("export")
def checkpoint_export(
    run: Run,
    file: Annotated[Path, argument("FILE", "File to write: .pt, .pth or .safetensors.", callback=writable)],
    step: Annotated[int | None, option("N", "Step of the checkpoint. Default: the newest.")] = None,
    optimizer: Annotated[
        str, option("NAME", "Name of the optimiser in hpcdist.save, for your own training loop.")
    ] = "optimizer",
) -> None:
    """Write the model of a checkpoint as one state dict, combined from all ranks.

    One process then loads it by model.load_state_dict(torch.load("model.pt")).

    Example: hpcdist checkpoint export runs/digits-allreduce-4-1 model.pt
    """
    from hpcdist import checkpoint
    from hpcdist.session import unsplit

    checkpoint.check_name(file)
    path = checkpoint.find(run, step)
    state = unsplit(path, optimizer)
    checkpoint.export(state, file)
    n_elements = sum(tensor.numel() for tensor in state.values())
    console.facts({"checkpoint": str(path), "file": str(file), "tensors": len(state), "elements": n_elements})
