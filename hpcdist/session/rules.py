"""The table of patterns: what a training loop may do, by the contract of its strategy.

Each row names a pattern, such as clipping gradients or freezing layers, the contracts that refuse it, and the error
message. All checks of a user's loop take their errors from this table, and so do tests and the documentation. So a
strategy of any author is guarded by its contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpcdist import strategies
from hpcdist.errors import ConfigError, HpcdistError, MismatchError
from hpcdist.strategies import Contract, Strategy
from hpcdist.strategies.base import name_of
from hpcdist.strategies.synchronous.agreement import CHANGED_DIFFERENTLY


class Rule(NamedTuple):
    """A pattern, and the strategies that refuse it.

    Attributes:
        message: names the setting or call, the rule, the value, and what to do. `{strategy}` is the strategy's name,
            `{others}` lists strategies that allow the pattern; other fields are filled in by the check.
        refused: (contract) -> whether strategies with this contract refuse the pattern; by default all do.
        error: the type of the error.
        alone: refused on a single rank, too.
    """

    message: str
    refused: Callable[[Contract], bool] = lambda contract: True
    error: type[HpcdistError] = ConfigError
    alone: bool = False


def forbids(pattern: str, strategy: Strategy | type[Strategy]) -> bool:
    """Return whether a strategy, with its options and number of ranks, refuses a pattern; a class: on several ranks."""
    rule = RULES[pattern]
    alone = isinstance(strategy, Strategy) and strategy.comm.size == 1
    return (rule.alone or not alone) and rule.refused(strategy.contract)


def refuse(pattern: str, strategy: Strategy | type[Strategy], **facts: Any) -> None:
    """Raise the error of a pattern that was detected, if the strategy refuses it."""
    if forbids(pattern, strategy):
        raise error(pattern, strategy, **facts)


def error(pattern: str, strategy: Strategy | type[Strategy] | None = None, **facts: Any) -> HpcdistError:
    """Return the error of a pattern; `facts` fill in the fields of its message."""
    rule = RULES[pattern]
    if strategy is not None:
        facts["strategy"] = name_of(strategy)
    if "{others}" in rule.message:
        *others, last = allowing(pattern)
        facts["others"] = f"{', '.join(others)} or {last}" if others else last
    return rule.error(rule.message.format(**facts))


def allowing(pattern: str) -> list[str]:
    """Return the strategies that allow a pattern with their default options."""
    loaded = ((name, strategies.load(name)) for name in strategies.available())
    return [name for name, cls in loaded if not RULES[pattern].refused(cls.contract)]


def _always(message: str) -> Rule:
    """Return the rule of a pattern that all strategies refuse, on a single rank too."""
    return Rule(message, alone=True)


RULES = {
    # --- gradients ----------------------------------------------------------------------------------------------------
    "gradients are changed between backward() and step()": Rule(
        "gradients must stay as backward() computed them with {strategy}, whose servers update from the gradients of "
        "several workers; got gradients that were changed before step(). To clip them, pass clip_norm to "
        "DistributedOptimizer; to scale them, scale the loss; or use allreduce.",
        lambda contract: not contract.uses_changed_gradients,
    ),
    "synchronize() is called": Rule(
        "synchronize() must be called with a strategy whose updates are made on this rank; got {strategy}, whose "
        "servers update from the gradients of several workers. To clip them, pass clip_norm to DistributedOptimizer.",
        lambda contract: not contract.uses_changed_gradients,
    ),
    "the loss is a sum": Rule(
        "loss must be mean with {strategy}, which weights portions of a batch by their samples; got sum. Let the "
        "closure return the mean loss of its portion, or use another strategy.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "the loss of micro-batches is no mean over samples": _always(
        "the loss must be a mean over samples with hpcdist.pipeline, which weights micro-batches by their samples; got "
        "{found}. Remove that, and let the loss be such a mean."
    ),
    "a sum is weighted": _always(
        "optimizer.set_batch_weight() must not be called with loss='sum', with which gradients are added without "
        "weights; got a call. Remove it, or let the loss be a mean."
    ),
    # --- steps --------------------------------------------------------------------------------------------------------
    "is_main() is called before rank 0 becomes a server": Rule(
        "hpcdist.is_main() must be called after hpcdist.DistributedOptimizer with {strategy}, which makes rank 0 a "
        "server and rank {worker} the main one; got an earlier call, which took rank 0. Move it after that call; for "
        "earlier work on one rank, such as a download, test hpcdist.rank() == 0.",
        lambda contract: contract.ranks == "some serve",
    ),
    "a server rank takes a step": Rule(
        "optimizer.step() must be called on workers only; rank {rank} is a server. Iterate over hpcdist.shard(loader), "
        "which yields no batch there and serves; without a DataLoader iterate over hpcdist.shard(batches, "
        "split=False), where `batches` is any iterable, such as range(1000).",
        lambda contract: contract.ranks == "some serve",
    ),
    "a step is taken in an evaluation": _always(
        "optimizer.step() must be outside of an evaluation; got a call in hpcdist.consensus, or in a loop over "
        "hpcdist.shard(..., training=False), whose end restores the model's parameters. End the evaluation first."
    ),
    "an epoch trains without step()": Rule(
        "optimizer.step() must be called for each update with {strategy}, which takes part in it; got an epoch "
        "without a call, in which parameters have changed. Other methods of the optimiser, and a `step` stored before "
        "DistributedOptimizer, bypass the strategy; allreduce allows that.",
        lambda contract: not contract.replicates or contract.step == "the strategy's",
    ),
    "an optimiser steps inside the backward pass": Rule(
        "optimizer.step() must be called after backward() with {strategy}, whose servers replace parameters that the "
        "pass still needs; got a call inside the pass, by a hook on a parameter's gradient. Step one optimiser after "
        "the pass; or use allreduce.",
        lambda contract: contract.updates == "on servers",
    ),
    "the optimiser evaluates its closure several times": Rule(
        "strategy must be {others} with {optimizer}, whose steps evaluate the loss several times, on all ranks' "
        "samples together; got {strategy}. Use {others}, or another optimiser.",
        lambda contract: contract.closure == "once",
        alone=True,
    ),
    "such an optimiser gets no closure": _always(
        "closure must be passed to each step of {optimizer}, which evaluates the loss several times; got none. Pass a "
        "function that zeroes the gradients, runs the backward pass and returns the loss."
    ),
    "such an optimiser's gradients are clipped": _always(
        "clip_norm must be None with {optimizer}, which needs the exact gradient of the loss at each evaluation; got "
        "{clip_norm}. Remove it."
    ),
    "such an optimiser's steps are skipped": _always(
        "strategy.on_nonfinite must be stop or ignore with {optimizer}, whose step can't be skipped in the middle; got "
        "skip, which amp = 'fp16' sets too. Use stop; amp = 'bf16' works with it."
    ),
    # --- parameters ---------------------------------------------------------------------------------------------------
    "parameters are changed between steps": Rule(
        "parameters must be changed only by the optimiser's step with {strategy} and these options, which replace them "
        "in steps, or send them between steps; the loop has changed some since the last step. Change them between "
        "epochs on all ranks, or use allreduce; dpsgd and sgp allow it with overlap = false.",
        lambda contract: contract.parameters == "replaced" or contract.sends == "between steps",
    ),
    "a frozen layer is unfrozen": Rule(
        "requires_grad of {name!r} must stay False with {strategy}; got True. Unfreeze it before creating the "
        "DistributedOptimizer; with plain allreduce it may be unfrozen at any time.",
        lambda contract: contract.frozen == "before" or contract.ranks == "some serve",  # servers don't see the change
        alone=True,
    ),
    "a layer is frozen later": Rule(
        "requires_grad of {name!r} must stay True with {strategy}, whose directions depend on earlier gradients and "
        "would still move it; got False. Freeze it before DistributedOptimizer, or use another strategy.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "replicas differ": Rule(
        "parameters must be the same on all ranks with {strategy}; those of rank {rank} differ from rank {first}'s. "
        "Load or change them on all ranks in the same way (hpcdist.broadcast(model) copies rank 0's), and use the same "
        "seed for noise that is added to gradients.",
        lambda contract: contract.replicates,
        error=MismatchError,
    ),
    "ranks train in different modes": Rule(
        "modes must be the same on all ranks that train; {name} was in {expected} mode in steps of rank {first}, and "
        "in {got} mode in those of rank {rank}. Call model.train() on all ranks before the loop's batches, also after "
        "an evaluation on one rank.",
        error=MismatchError,
    ),
    "gradients are changed on some ranks only": Rule(
        CHANGED_DIFFERENTLY, lambda contract: contract.replicates, error=MismatchError
    ),
    "embeddings are normalised in the forward pass": Rule(
        "max_norm of embeddings must be None if several ranks train one model; got {max_norm} in {name!r}, whose "
        "forward pass would change the rows of its batch on each rank. Normalise the layer's output, or the whole "
        "table after each step.",
    ),
    "the model has SyncBatchNorm": Rule(
        "SyncBatchNorm must be used with a synchronous strategy; got {name!r} with {strategy}. "
        "Use BatchNorm, or {others}.",
        lambda contract: not contract.synchronous,
        alone=True,
    ),
    # --- optimisers ---------------------------------------------------------------------------------------------------
    "an additional method of the optimiser is called": Rule(
        "optimizer must be used by step() and the methods of torch's optimisers with {strategy}, which evaluates and "
        "saves other parameters than those of this rank's model; got {optimizer}.{method}(), which changes these. Use "
        "allreduce, or another optimiser.",
        lambda contract: contract.consensus == "elsewhere",
    ),
    "an additional method of the optimiser is called in the loop": Rule(
        "optimizer.{method}() must be called outside of the training loop with {strategy}, whose servers have the "
        "state of {optimizer}; got a call inside. Call it between epochs, on all ranks; or use allreduce.",
        lambda contract: contract.updates == "on servers",
    ),
    "an additional method of the optimiser is called in an evaluation": _always(
        "optimizer.{method}() must be called outside of an evaluation; got one in hpcdist.consensus, or in a loop over "
        "hpcdist.shard(..., training=False), whose end restores the model's parameters. Call it before, and its "
        "opposite afterwards."
    ),
    "the optimiser wraps another one": _always(
        "optimizer must be a torch.optim.Optimizer; got {kind}, which wraps one. Distribute the wrapped one, its "
        "{name!r}, and wrap the result: {kind}(hpcdist.DistributedOptimizer(optimizer, model), ...)."
    ),
    "a group of parameters is added": Rule(
        "param_groups must stay those of the creation of DistributedOptimizer, because its servers have them; got "
        "another one, of {count} parameters. Add it before.",
        lambda contract: contract.updates == "on servers",
    ),
    "parameters are put into a group by hand": _always(
        "param_groups must keep their parameters from the creation of DistributedOptimizer; got others. Add "
        "parameters by optimizer.add_param_group, which checks whether they can be added."
    ),
    "the optimiser's state is loaded within an epoch": Rule(
        "optimizer.load_state_dict() must be outside of the training loop with {strategy}, whose servers have the "
        "optimiser's state; got one inside. Do it between epochs, on all ranks.",
        lambda contract: contract.updates == "on servers" and contract.ranks == "some serve",
    ),
    "the optimiser's state differs": Rule(
        "optimizer's state must be loaded on all ranks, or on none; rank {first} has the state of {expected}, and rank "
        "{rank} of {got}. Load it on every rank: rank 0's parameters are broadcast, its optimizer's state is not.",
        error=MismatchError,
    ),
    "an optimiser is distributed twice": _always(
        "optimizer must be a plain torch optimiser; got one that is distributed already."
    ),
    "the optimiser is not torch's": _always("optimizer must be a torch.optim.Optimizer; got {kind}."),
    "the optimiser takes sparse gradients": _always(
        "optimizer must take dense gradients, because ranks convert sparse ones to average them; got SparseAdam. Use "
        "Adam or Adagrad."
    ),
    "the model is missing": _always(
        "model must be the torch.nn.Module that optimizer trains; got {kind}. Pass it second: "
        "DistributedOptimizer(optimizer, model)."
    ),
    "the model is wrapped in DistributedDataParallel": _always(
        "model must not be wrapped in DistributedDataParallel, which averages gradients too; got one that is, or a "
        "part of it. Pass the model itself (model.module), and call it in the loop; or hpcdist.local_shards(model), "
        "if DistributedDataParallel averages only among the ranks of an hpcdist.device_mesh. Accelerate does not wrap "
        "it with accelerator.prepare_model(model, evaluation_mode=True). Instead of transformers' Trainer use "
        "hpcdist.hf.Trainer, with a plain optimizer."
    ),
    "two optimisers have one parameter": _always(
        "each parameter must be in one DistributedOptimizer; got {name!r} in two. Pass disjoint parameters; or call "
        "hpcdist.finish(model) when the first training has ended."
    ),
    "a plain optimiser trains the rest of the model": Rule(
        "each optimiser in the loop must be a DistributedOptimizer; got parameter {name!r} of the model, which another "
        "optimiser trained with this rank's gradients only. Distribute that optimiser, too.",
    ),
    "optimisers of one loop have different workers": Rule(
        "optimizers of one loop must have the same workers; got ranks {ranks}. Use strategies with the same number of "
        "servers, or without servers.",
    ),
    "several optimisers share a loop": Rule(
        "a loop with a strategy that evaluates portions of its batches must have one optimizer; got {count}. Give one "
        "optimizer all parameters, or use another strategy.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    # --- models in stages ---------------------------------------------------------------------------------------------
    "the model is in stages": Rule(
        "strategy must handle each stage separately if a model is in stages; got {strategy}, whose directions and line "
        "search use all parameters. Use another one.",
        lambda contract: contract.batch == "portions",
    ),
    "micro-batches go to other replicas": Rule(
        "routing must be straight with {strategy} and these options, whose servers take no batches; got random. Remove "
        "it, or use a strategy without servers, such as allreduce or noloco.",
        lambda contract: contract.ranks == "some serve",
    ),
    "the optimiser of a stage searches along lines": Rule(
        "optimizer must handle each stage separately if a model is in stages; got {kind}, whose directions and line "
        "search use all parameters. Use another one.",
    ),
    "the optimiser of a stage has other parameters": Rule(
        "optimizer must have parameters of this rank's stages; got {count} others. Pass model.parameters() of the "
        "result of hpcdist.pipeline or local_shards; make a loss with parameters the last layer.",
    ),
    "the ranks of a replica read different batches": Rule(
        "batches must be the same on all ranks of a replica; ranks {first} and {rank} have read different ones. A "
        "loader that reads its own part must use model.grid.replica instead of hpcdist.rank(), and a generator of the "
        "loader must have the same seed on all ranks.",
        error=MismatchError,
    ),
    # --- loaders ------------------------------------------------------------------------------------------------------
    "a loader is sharded twice": _always(
        "loader must be a plain DataLoader; got one that is sharded already. Shard it once."
    ),
    "the loader is not torch's": _always(
        "loader must be a torch DataLoader, whose samples hpcdist.shard splits among the ranks; got {kind}. Create one "
        "for the data set; or pass split=False, if each rank reads different samples."
    ),
    "the sampler splits samples already": Rule(
        "loader's sampler must yield all samples, which hpcdist.shard splits among the ranks; got {kind}, which "
        "splits them among ranks already. Remove it, or pass split=False.",
    ),
    "a sampler has no end": _always(
        "loader's sampler must end in each epoch if hpcdist.shard distributes its samples; got {kind}, which continues "
        "after {drawn} samples of a data set of {length}. Let it end after an epoch; or pass split=False, and let each "
        "rank's loader read different samples."
    ),
    "the loader overrides how it iterates": _always(
        "loader must iterate as torch's DataLoader does if hpcdist.shard distributes its samples; got {kind}, which "
        "overrides {name}. Pass split=False, and let each rank's loader read different samples, such as "
        "indices[hpcdist.rank()::hpcdist.size()]; or pass a DataLoader of its data set."
    ),
    "batches can't be compared": Rule(
        "batches must be picklable if ranks compare them, as those of an IterableDataset; got "
        "{kind}, which is not. Pass split=False, and let each rank read different samples.",
    ),
    "a split has another name": _always(
        "split must be True, False or 'dirichlet'; got {split!r}. Remove it to distribute any sample to any rank."
    ),
    "a loader with a sampler is split by label": _always(
        "loader must read a map-style data set in order, or shuffled, if it is split by label; got a sampler or a "
        "stream. Remove the sampler, or the split."
    ),
    "joint batches are split by label": Rule(
        "samples must be available to all workers with {strategy}, where all compute parts of one joint batch; got a "
        "split by label. Remove the split, or use {others}.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "the loader yields whole batches, or reads its own samples": Rule(
        "loader must read single samples of a map-style data set with a strategy that evaluates portions of a joint "
        "batch; got a sampler of batches, or a loader that reads its own samples. Pass a batch_size.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "the loader is iterated before an optimiser is distributed": _always(
        "a sharded loader must be iterated after hpcdist.DistributedOptimizer, which determines the ranks that train, "
        "and before hpcdist.finish; got no optimiser that is distributed. For an evaluation pass training=False."
    ),
    "a training loader is iterated for an evaluation": Rule(
        "loader must be an evaluation loader in a loop that only runs the model; got a training loader, and neither "
        "backward() nor step(), so that each rank has seen only its samples. Use hpcdist.shard(loader, "
        "training=False), and hpcdist.metric for the metrics of all ranks; or iterate inside torch.no_grad(), where "
        "each rank gets all samples.",
    ),
    "update_bn reads different samples on each rank": Rule(
        "update_bn must get a loader of all samples for a {model} that no DistributedOptimizer trains, whose running "
        "statistics are not averaged; got one with split=False, of this rank's samples. Pass a plain DataLoader of all "
        "samples.",
    ),
    "batch norm's statistics change in an evaluation": _always(
        "model must be in eval() mode in an evaluation, hpcdist.consensus or hpcdist.shard(..., training=False), whose "
        "end restores its buffers; got batch norm's running statistics that have changed. Call model.eval() first; "
        "call update_bn outside of an evaluation."
    ),
    "the weight of a batch is set in the loader": _always(
        "loader.weight must not be set; got {value}. Call optimizer.set_batch_weight(n), with the number of samples or "
        "tokens that this rank's loss averages over."
    ),
    "workers read different data": Rule(
        "loader must be the same on all workers, which share its samples; {name} is {expected} on rank {first} and "
        "{got} on rank {rank}. Create it in the same way on all ranks, with one seed for random_split and "
        "permutations; or pass split=False, if each rank's loader reads different samples.",
        error=MismatchError,
    ),
    # --- transformers' Trainer ----------------------------------------------------------------------------------------
    "the Trainer distributes the model itself": _always(
        "{name} of TrainingArguments must not be set with hpcdist.hf.Trainer, whose strategy distributes samples and "
        "averages; got {value!r}, with which the Trainer distributes the model itself, or one rank deviates from the "
        "others. Remove it."
    ),
    "a run is resumed on other workers": _always(
        "resume_from_checkpoint must be a run with the same number of workers, because the Trainer finds its position "
        "by counting their steps; got one of {saved} workers on {count}. Start {saved}; or load the model by "
        "from_pretrained and train without resuming."
    ),
    "an epoch of a stream is left for an evaluation": Rule(
        "train_dataset must have a length if there are server ranks and the Trainer evaluates or saves within an "
        "epoch; got an IterableDataset, which can't continue where it was left. Evaluate and save at the end "
        "(eval_strategy and save_strategy 'no' or 'epoch'), or use a strategy without servers.",
        lambda contract: contract.ranks == "some serve",
    ),
    # --- positions in the loop ----------------------------------------------------------------------------------------
    "ranks are at different places in the loop": Rule(
        "ranks must go through the loop in the same way; rank {first} is {place} and rank {rank} {other}. Decide on "
        "all ranks together when to stop or to evaluate: by hpcdist.metric, or a value from "
        "hpcdist.broadcast.{serving}",
        error=MismatchError,
    ),
    "a collective call is inside the loop": Rule(
        "{call} must be outside of the training loop if there are server ranks, which can't take part inside it; got "
        "one inside. Do it between epochs: after the loop over hpcdist.shard(loader).",
        lambda contract: contract.ranks == "some serve",
    ),
    "server ranks are called by torch.distributed": Rule(
        "calls of torch.distributed must be outside of the training loop if there are server ranks, which don't make "
        "them; got one that needs rank {serving}. Call hpcdist.allreduce, allgather, broadcast or metric, which "
        "workers share; or pass the call, or a metric's process_group, dist.new_group({workers}), created before the "
        "loop.",
        lambda contract: contract.ranks == "some serve",
    ),
    "no distributed optimiser trains the model": _always(
        "model must be trained by a DistributedOptimizer; got one that none trains, or one that ranks have changed "
        "since its end. Pass the module that hpcdist.DistributedOptimizer(optimizer, model) got."
    ),
}
