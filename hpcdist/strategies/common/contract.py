"""The contract of a strategy: a few words that say how it behaves in a training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from hpcdist.errors import ConfigError, UnknownNameError

_FORMER = {"meets": "synchronizes"}  # words of before, by those of now


@dataclass(frozen=True)
class Contract:
    """The behaviour of a strategy, as far as a user's loop, the model's memory or a job's launcher must know it.

    `session/rules.py` decides by it which habits of a loop are fine and which are refused, so a strategy of yours is
    guarded as those of hpcdist are. A strategy declares it for several ranks; its `Config.narrow` may change words by
    options and by the number of ranks.

    Attributes:
        averages: what an update or an exchange averages: gradients of several workers, weighted by their samples;
            parameters (or changes of them); nothing.
        synchronizes: when all workers communicate with each other, so that all must take as many steps.
        updates: where the optimiser's step is made: on each worker, or on servers, which then have its state and use
            the numbers (learning rate...) of the workers' param_groups.
        batch: what a step's gradient is of: each worker's own batch, or portions of the joint batch of all workers.
        closure: how often the optimiser's own step may evaluate the closure that it is given: once, or as often as it
            likes (torch's L-BFGS), each time on the samples of all ranks together. The strategy has `minimise` for it.
        optimizer: which local optimisers it goes with: any; torch's SGD alone; or Adam, torch's Adam and AdamW.
        step: whose step moves the parameters: the optimiser's; or the strategy's own, where the optimiser is a part of
            the algorithm. Then each parameter's rate, decay and other numbers are read from its group, hooks on
            the optimiser's step run around the strategy's, and its own is not run. So schedules and GradScaler do what
            they always do; and state that such an optimiser has too, as Adam's moments, is in its `state` for
            checkpoints.
        parameters: what becomes of a worker's parameters in a step: kept, and moved by the strategy's own arithmetic;
            or replaced by values of servers, so that changes which the loop has made are lost.
        frozen: when a frozen parameter may be unfrozen: at any time, or only before the optimiser is distributed.
        consensus: where the parameters lie that are evaluated and saved: in the models of the ranks that make updates;
            or elsewhere, in a centre or in copies that ranks exchange, which don't follow changes of a model.
        sends: when parameters travel: within steps, or between them too, while the loop runs.
        ranks: whether all ranks work, or some only serve the others, and run no step of the loop.
        memory: whether ranks of other nodes read this rank's memory while it computes, which a thread then answers.
        deaths: what follows when a rank dies, where the launcher lets the others live: they end, or go on without it.
    """

    averages: Literal["gradients", "parameters", "nothing"]
    synchronizes: Literal["every step", "every period", "never"]
    updates: Literal["here", "on servers"] = "here"
    batch: Literal["local", "portions"] = "local"
    closure: Literal["once", "often"] = "once"
    optimizer: Literal["any", "SGD", "Adam"] = "any"
    step: Literal["the optimiser's", "the strategy's"] = "the optimiser's"
    parameters: Literal["kept", "replaced"] = "kept"
    frozen: Literal["at any time", "before"] = "before"
    consensus: Literal["in models", "elsewhere"] = "in models"
    sends: Literal["within steps", "between steps"] = "within steps"
    ranks: Literal["all work", "some serve"] = "all work"
    memory: Literal["private", "read by others"] = "private"
    deaths: Literal["end all", "others continue"] = "end all"

    def __new__(cls, *words: str, **named: str) -> Contract:
        for name in named.keys() & _FORMER.keys():
            raise ConfigError(
                f"Contract must not be given {name!r}, which has another name now; write {_FORMER[name]}="
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, words in get_type_hints(type(self)).items():
            if getattr(self, name) not in get_args(words):
                raise UnknownNameError(f"{name} of a Contract", str(getattr(self, name)), get_args(words))

    @property
    def synchronous(self) -> bool:
        """Whether all workers must take the same number of steps."""
        return self.synchronizes != "never"

    @property
    def weights_batches(self) -> bool:
        """Whether the gradient of a batch counts by the number of its samples."""
        return self.averages == "gradients" and self.batch == "local"

    @property
    def replicates(self) -> bool:
        """Whether all ranks have the same parameters after every step."""
        return (self.averages, self.synchronizes, self.updates) == ("gradients", "every step", "here")

    @property
    def uses_changed_gradients(self) -> bool:
        """Whether an update is of gradients as they are when `step` is called, so that the loop may change them."""
        return self.updates == "here" or self.averages != "gradients"

    @property
    def reads_gradients(self) -> bool:
        """Whether a step needs gradients in flat memory; else they stay where autograd makes them."""
        return self.averages != "parameters" or self.updates == "on servers"
