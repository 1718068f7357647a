"""The contract of a strategy: describes how it behaves in a training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from hpcdist.errors import ConfigError, UnknownNameError

_FORMER = {"meets": "synchronizes"}  # former field -> current field


@dataclass(frozen=True)
class Contract:
    """Properties of a strategy that a user's loop, the model's memory or a job's launcher depends on.

    `session/rules.py` decides from the contract which loop patterns are refused, for your own strategies too. A
    strategy declares it for several ranks; its `Config.narrow` may change fields by options and the number of ranks.

    Attributes:
        averages: what an update or an exchange averages: gradients of several workers, weighted by their samples;
            parameters (or changes of them); nothing.
        synchronizes: when all workers communicate with each other. Unless never, all must take equally many steps.
        updates: where the optimiser's step runs: on each worker, or on servers, which then hold its state and use
            the workers' hyper-parameters (learning rate...).
        batch: whose samples a step's gradient is computed from: each worker's local batch, or portions of the joint
            batch of all workers.
        closure: how often the optimiser's step may evaluate its closure: once, or often (torch's L-BFGS), each time
            on the samples of all ranks. For the latter the strategy defines `minimise`.
        optimizer: supported local optimisers: any; SGD: only torch's SGD; Adam: torch's Adam and AdamW.
        step: whose step changes the parameters: the optimiser's, or the strategy's, where the optimiser is a part of
            the algorithm. The strategy's step reads learning rate, decay... from each parameter's group, and runs the
            hooks on the optimiser's step, but not the step. So schedules and GradScaler work as usual. Adam's
            moments are in the optimiser's `state`, for checkpoints.
        parameters: whether a worker's parameters are kept in a step and changed by the strategy's arithmetic, or
            replaced by servers' values, so that the loop's changes are lost.
        frozen: when a frozen parameter may be unfrozen: at any time, or only before the optimiser is distributed.
        consensus: where the parameters to evaluate and save are: in the models of the ranks that run updates; or
            elsewhere, in a centre or in copies that ranks exchange, which don't follow changes of a model.
        sends: when parameters are sent: within steps, or between them too, while the loop runs.
        ranks: whether all ranks are workers, or some are servers, which run no step of the loop.
        memory: whether ranks of other nodes read this rank's memory while it computes, served by a thread.
        deaths: what happens when a rank fails and the launcher keeps the others: they end, or continue without it.
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
        """Whether a batch's gradient is weighted by its number of samples."""
        return self.averages == "gradients" and self.batch == "local"

    @property
    def replicates(self) -> bool:
        """Whether all ranks have the same parameters after every step."""
        return (self.averages, self.synchronizes, self.updates) == ("gradients", "every step", "here")

    @property
    def uses_changed_gradients(self) -> bool:
        """Whether an update uses the gradients as they are when `step` is called, so that the loop may change them."""
        return self.updates == "here" or self.averages != "gradients"

    @property
    def reads_gradients(self) -> bool:
        """Whether a step needs gradients in flat memory; else they stay where autograd creates them."""
        return self.averages != "parameters" or self.updates == "on servers"
