"""`hpcdist checkpoint`: what a run has saved, and the model in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import completion, console
from hpcdist.tools.cli.base import writable

app = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="The checkpoints of a run: list them, take the model out of one."
)

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Folder of a run, folder of checkpoints, or one checkpoint.", autocompletion=completion.runs
    ),
]


@app.command("show")
def checkpoint_show(run: Run) -> None:
    """List the checkpoints of a run, the newest first, and check every file.

    If one is damaged, the exit status is 1.

    Example: hpcdist checkpoint show runs/digits-allreduce-4-1
    """
    from hpcdist.checkpoint import survey

    found = survey(run)
    console.rows(
        None,
        [
            {
                "checkpoint": one.path.name,
                "step": one.step,
                "written": one.written.isoformat(" ", "minutes"),
                "ranks": one.ranks,
                "stages": one.stages,
                "MB": one.n_bytes / 1e6,
                "hpcdist": one.version,
                "files": "damaged" if one.damage else "whole",
            }
            for one in found
        ],
    )
    damages = [one.damage for one in found if one.damage]
    for damage in damages:
        console.note(damage)
    if damages:
        raise typer.Exit(1)


@app.command("export")
def checkpoint_export(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write: .pt, .pth or .safetensors.", callback=writable)
    ],
    step: Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint. Default: the newest.")] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the optimiser in hpcdist.save, in a training loop of your own.")
    ] = "optimizer",
) -> None:
    """Write the model of a checkpoint, of all ranks together, as one state dict.

    One process then loads it by model.load_state_dict(torch.load("model.pt")).

    Example: hpcdist checkpoint export runs/digits-allreduce-4-1 model.pt
    """
    from hpcdist import checkpoint
    from hpcdist.session import unsplit

    checkpoint.check_name(file)
    found = checkpoint.find(run, step)
    state = unsplit(found, optimizer)
    checkpoint.export(state, file)
    n_elements = sum(tensor.numel() for tensor in state.values())
    console.facts({"checkpoint": str(found), "file": str(file), "tensors": len(state), "elements": n_elements})
