"""The parallel table: a model in stages, one or more on each rank of a replica."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpcdist.config.settings import Settings


class ParallelConfig(Settings):
    """The stages of a model, and how a batch goes through them. With one stage every rank holds the whole model."""

    stages: int = Field(1, ge=1, description="ranks that hold one whole model together; 1 is no pipeline")
    micro_batches: int = Field(4, ge=1, description="parts of a batch that are in the pipeline one behind the other")
    schedule: str = Field(
        "one_f_one_b",
        description="order of the ranks' work: one_f_one_b, gpipe, interleaved, zero_bubble, file.py:table",
    )
    chunks: int = Field(1, ge=1, description="stages of each rank, such as 2 with the schedule interleaved")
    recompute: bool = Field(False, description="compute activations again in the backward pass instead of keeping them")
    cut: Literal["measured"] | tuple[int, ...] | None = Field(
        None, description="layers of each stage; measured balances their times, none their parameters"
    )
    spread: bool = Field(False, description="let a replica's ranks lie on several nodes")

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        stages, sizes = self.stages * self.chunks, self.sizes
        if sizes is not None and (len(sizes) != stages or min(sizes) < 1):
            raise ValueError(
                f"parallel.cut must be {stages} numbers of layers, at least 1 for each of {self.stages} stages"
                f"{f' times {self.chunks} chunks' * (self.chunks > 1)}; got {', '.join(map(str, sizes)) or 'none'}. "
                "Change them, or leave them out."
            )
        return self

    @property
    def whole(self) -> bool:
        """Tell whether every rank holds the whole model."""
        return self.stages == 1

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Return the given numbers of layers; None where the cut is to be computed."""
        return None if self.cut == "measured" else self.cut

    @property
    def measures(self) -> bool:
        """Tell whether layers are to be measured, to cut by their times."""
        return self.cut == "measured" and not self.whole
