"""`hpcdist checkpoint`: what a run has saved, and the model in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import console

app = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="A run's checkpoints: their state, and the model in them."
)

Run = Annotated[Path, typer.Argument(help="Folder of a run, folder of checkpoints, or one checkpoint.")]


@app.command("show")
def checkpoint_show(run: Run) -> None:
    """List checkpoints, the newest first, and check every file. If one is damaged, the exit status is 1."""
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
    file: Annotated[Path, typer.Argument(help="File to write: .pt, .pth or .safetensors.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step of the checkpoint; by default the newest.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Of a loop of one's own: the optimiser's name in hpcdist.save.")
    ] = "optimizer",
) -> None:
    """Write the state dict of the whole model that the ranks of a run stand for together, for one process.

    Example: hpcdist checkpoint export runs/long model.pt, then model.load_state_dict(torch.load("model.pt"))
    """
    from hpcdist import checkpoint
    from hpcdist.session import unsplit

    checkpoint.check_name(file)
    found = checkpoint.find(run, step)
    state = unsplit(found, optimizer)
    checkpoint.export(state, file)
    n_elements = sum(tensor.numel() for tensor in state.values())
    console.facts({"checkpoint": str(found), "file": str(file), "tensors": len(state), "elements": n_elements})
