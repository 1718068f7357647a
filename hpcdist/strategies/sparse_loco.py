"""SparseLoCo: many local steps, then exchange the largest differences, two bits each, with decaying error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

from pydantic import model_validator

from hpcdist import compress
from hpcdist.compress import CompressionConfig, Compressor
from hpcdist.config.settings import Field, joint_rule
from hpcdist.strategies.synchronous.fragments import Fragment
from hpcdist.strategies.synchronous.periodic import OverlapConfig, Periodic


class SparseCompression(CompressionConfig):
    """A compressor by name; the defaults of chunk_topk are values = 2bit and decay = 0.95 here."""

    name: str = Field("chunk_topk", "compressor; chunk_topk with values = 2bit and decay = 0.95")

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_paper(cls, value: Any) -> Any:
        options = {"name": value} if isinstance(value, str) else value
        if isinstance(options, Mapping) and options.get("name", "chunk_topk") == "chunk_topk":
            decay = {} if options.get("error_feedback") is False else {"decay": 0.95}
            return {"values": "2bit", **decay, **options}
        return options


@final
class SparseLoCo(Periodic):
    """Run the local optimiser; every H = `period` steps move the common parameters by sparse messages of all ranks.

    Rank i adds δᵢ = x − θᵢ, the common parameters x minus its local ones, to its residual, which decays by the
    compressor's `decay` at each exchange; it sends the largest elements of each chunk, see `chunk_topk`, and keeps the
    rest in the residual. x moves by −`outer_lr` times the mean of the messages, and all ranks continue from x. The
    residual replaces the outer momentum of `diloco`. With `combine` = senders an element's mean is over the ranks that
    have sent it; with `ranks` it is over all ranks.

    Replicas are bitwise equal after each exchange, and differ between exchanges; evaluations use their mean. Each rank
    keeps the state of its local optimiser. On one rank only the local optimiser runs.

    Bytes per rank and exchange: (p − 1)·m for a message of m bytes, about n/200 for n bytes of float32 parameters with
    the defaults. That is less than an all-reduce of all parameters up to about 400 ranks. Memory per rank: two
    parameter vectors (x and the residual), with `overlap` four.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sparse_loco", period=4, compression="chunk_topk")

    Reference: Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky, "Communication efficient LLM pre-training
    with SparseLoCo", 2025. Its published code applies the outer rate twice; here it applies once.
    """

    class Config(OverlapConfig):
        period: int = Field(30, "H: local steps to one exchange", ge=1)
        outer_lr: float = Field(1.0, "step of the common parameters along the mean of the messages", gt=0)
        combine: Literal["ranks", "senders"] = Field(
            "ranks", "compute an element's mean over all ranks, or over its senders"
        )
        compression: SparseCompression = Field(
            SparseCompression.from_mapping({}), "how differences are compressed; none would be diloco"
        )

        @joint_rule
        def _sends_parts(self) -> None:
            chosen = compress.load(self.compression.name)
            if not self.compression:
                raise ValueError(
                    "strategy.compression of sparse_loco must be a compressor; got none, with which it is diloco "
                    "without momentum. Take chunk_topk, or strategy = diloco."
                )
            if self.combine == "senders" and chosen.count_sent is Compressor.count_sent:
                raise ValueError(
                    "strategy.combine must be ranks unless a rank sends some elements and not others; got senders "
                    f"with {self.compression.name}, of which each message has all. Take chunk_topk or topk, or ranks."
                )

    config: Config

    @property
    def over_senders(self) -> bool:
        return self.config.combine == "senders"

    def move(self, fragment: Fragment) -> None:
        for x, mean in fragment.views(self.common, self.mean):
            x.sub_(mean, alpha=self.config.outer_lr)
