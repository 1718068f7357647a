"""The table of habits: what a training loop may do, by the contract of its strategy.

A row names a habit, tells with which contracts it is refused, and has the message. All that refuse something in a
user's loop take the error from here, tests of loops and the lists in the documentation too; so a strategy is guarded by
its contract alone, whoever has written it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpcdist import strategies
from hpcdist.errors import ConfigError, HpcdistError, MismatchError
from hpcdist.strategies import Contract, Strategy
from hpcdist.strategies.base import name_of
from hpcdist.strategies.synchronous.agreement import CHANGED_APART


class Rule(NamedTuple):
    """A habit, and the strategies that refuse it.

    Attributes:
        message: names the setting or call, the rule, what was found, and what to do. Filled in where the habit is
            seen; `{strategy}` is the strategy's name, `{others}` names those that allow the habit.
        refused: tells whether strategies with this contract refuse the habit; all do by default.
        error: the type of the error.
        alone: refused on one rank, too.
    """

    message: str
    refused: Callable[[Contract], bool] = lambda contract: True
    error: type[HpcdistError] = ConfigError
    alone: bool = False


def forbids(habit: str, strategy: Strategy | type[Strategy]) -> bool:
    """Tell whether a strategy, with its options and on its ranks, refuses a habit; or a class, on several ranks."""
    rule = RULES[habit]
    alone = isinstance(strategy, Strategy) and strategy.comm.size == 1
    return (rule.alone or not alone) and rule.refused(strategy.contract)


def refuse(habit: str, strategy: Strategy | type[Strategy], **facts: Any) -> None:
    """Raise the error of a habit that has been seen, where the strategy refuses it."""
    if forbids(habit, strategy):
        raise error(habit, strategy, **facts)


def error(habit: str, strategy: Strategy | type[Strategy] | None = None, **facts: Any) -> HpcdistError:
    """Make the error of a habit; `facts` are the values of the names in the message."""
    rule = RULES[habit]
    if strategy is not None:
        facts["strategy"] = name_of(strategy)
    if "{others}" in rule.message:
        *others, last = allowing(habit)
        facts["others"] = f"{', '.join(others)} or {last}" if others else last
    return rule.error(rule.message.format(**facts))


def allowing(habit: str) -> list[str]:
    """List the strategies that allow a habit, with their options as they are by default."""
    loaded = ((name, strategies.load(name)) for name in strategies.available())
    return [name for name, cls in loaded if not RULES[habit].refused(cls.contract)]


def _always(message: str) -> Rule:
    """Return the rule of a habit that all strategies refuse, on one rank too."""
    return Rule(message, alone=True)


RULES = {
    # --- gradients ----------------------------------------------------------------------------------------------------
    "gradients are changed between backward() and step()": Rule(
        "gradients must stay as backward() leaves them with {strategy}, whose update is of several workers' gradients "
        "and is made on a server; got gradients that were changed before step(). To clip them, pass clip_norm to "
        "DistributedOptimizer; to scale them, scale the loss; or use allreduce.",
        lambda contract: not contract.uses_changed_gradients,
    ),
    "synchronize() is called": Rule(
        "synchronize() must be called with a strategy whose updates are made on this rank; got {strategy}, whose "
        "servers make them of several workers' gradients. To clip them, pass clip_norm to DistributedOptimizer.",
        lambda contract: not contract.uses_changed_gradients,
    ),
    "the loss is a sum": Rule(
        "loss must be mean with {strategy}, which weighs portions of a batch by their samples; got sum. Let the "
        "closure return the mean loss of its portion, or use another strategy.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "the loss of micro-batches is no mean over samples": _always(
        "the loss must be a mean over samples with hpcdist.pipeline, which weighs micro-batches by their samples; got "
        "{found}. Leave that out, and let the loss be such a mean."
    ),
    "a sum is weighed": _always(
        "optimizer.set_batch_weight() must be omitted with loss='sum', with which gradients add up as they are; got a "
        "call. Leave it out, or let the loss be a mean."
    ),
    # --- steps --------------------------------------------------------------------------------------------------------
    "is_main() is called before rank 0 serves": Rule(
        "hpcdist.is_main() must be called after hpcdist.DistributedOptimizer with {strategy}, where rank 0 serves and "
        "rank {worker} is the main one; got a call before it, which took rank 0 for it. Move that behind it; what one "
        "rank does before, as a download, is for hpcdist.rank() == 0.",
        lambda contract: contract.ranks == "some serve",
    ),
    "a rank that serves takes a step": Rule(
        "optimizer.step() must be called on workers only; rank {rank} serves them. Iterate over hpcdist.shard(loader), "
        "which serves there and yields no batch; where there is no DataLoader, over hpcdist.shard(batches, "
        "split=False), batches being any iterable, such as range(1000).",
        lambda contract: contract.ranks == "some serve",
    ),
    "a step is taken in an evaluation": _always(
        "optimizer.step() must be outside of an evaluation; got one in hpcdist.consensus, or in a loop over "
        "hpcdist.shard(..., training=False), after which the model has its own parameters again. Leave it."
    ),
    "an epoch trains without step()": Rule(
        "optimizer.step() must be called for each update with {strategy}, which takes part in it; got an epoch "
        "without, in which parameters have changed. An optimiser's other methods, and a step kept from before it "
        "became a DistributedOptimizer, pass the strategy by; allreduce allows that.",
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
    "such an optimiser is given no closure": _always(
        "closure must be given to each step of {optimizer}, which evaluates the loss several times; got none. Pass a "
        "function that zeroes the gradients, runs the backward pass and returns the loss."
    ),
    "such an optimiser's gradients are clipped": _always(
        "clip_norm must be None with {optimizer}, which needs the loss's own gradient at each evaluation; got "
        "{clip_norm}. Leave it out."
    ),
    "such an optimiser's steps are left out": _always(
        "strategy.on_nonfinite must be stop or ignore with {optimizer}, whose step can't be left out half made; got "
        "skip, which amp = 'fp16' sets too. Use stop; amp = 'bf16' does with that."
    ),
    # --- parameters ---------------------------------------------------------------------------------------------------
    "parameters are changed between steps": Rule(
        "parameters must be changed by the optimiser's step alone with {strategy} and these options: they are replaced "
        "in steps, or sent between them; got some that the loop has changed since the last step. Change them between "
        "epochs on all ranks, or use allreduce; with dpsgd and sgp overlap = false allows it, too.",
        lambda contract: contract.parameters == "replaced" or contract.sends == "between steps",
    ),
    "a frozen layer is unfrozen": Rule(
        "requires_grad of {name!r} must stay False with {strategy}; got True. Unfreeze it first and make the "
        "DistributedOptimizer after; with plain allreduce it may be unfrozen at any time.",
        lambda contract: contract.frozen == "before" or contract.ranks == "some serve",  # these don't see it
        alone=True,
    ),
    "a layer is frozen later": Rule(
        "requires_grad of {name!r} must stay True with {strategy}, whose directions follow earlier gradients and would "
        "move it on; got False. Freeze it before DistributedOptimizer, or take another strategy.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "replicas differ": Rule(
        "parameters must be the same on all ranks with {strategy}; those of rank {rank} differ from rank {first}'s. "
        "Load or change them on all ranks alike (hpcdist.broadcast(model) spreads rank 0's), and draw what is added to "
        "gradients from the same seed.",
        lambda contract: contract.replicates,
        error=MismatchError,
    ),
    "ranks train in different modes": Rule(
        "modes must be the same on all ranks that train; {name} was in {own} mode in steps of rank {first}, and in "
        "{theirs} mode in those of rank {rank}. Call model.train() on all ranks before the loop's batches, also after "
        "an evaluation on one rank.",
        error=MismatchError,
    ),
    "gradients are changed on some ranks only": Rule(
        CHANGED_APART, lambda contract: contract.replicates, error=MismatchError
    ),
    "embeddings are normalised in the forward pass": Rule(
        "max_norm of embeddings must be None where ranks train one model; got {max_norm} in {name!r}, whose forward "
        "pass would change on each rank the rows of its own batch. Normalise what the layer returns, or the whole "
        "table after each step.",
    ),
    "the model has SyncBatchNorm": Rule(
        "SyncBatchNorm must go with a strategy whose ranks take their steps together; got {name!r} with {strategy}. "
        "Use BatchNorm, or {others}.",
        lambda contract: not contract.synchronous,
        alone=True,
    ),
    # --- optimisers ---------------------------------------------------------------------------------------------------
    "a method of the optimiser's own is called": Rule(
        "optimizer must be used by step() and what all of torch's have with {strategy}, for the parameters that are "
        "evaluated and saved are not those of this rank's model; got {optimizer}.{method}(), which changes these. Use "
        "allreduce, or another optimiser.",
        lambda contract: contract.consensus == "elsewhere",
    ),
    "a method of the optimiser's own is called in the loop": Rule(
        "optimizer.{method}() must be called outside of the training loop with {strategy}, for its servers have the "
        "state of {optimizer}; got a call inside. Call it between epochs, on all ranks; or use allreduce.",
        lambda contract: contract.updates == "on servers",
    ),
    "a method of the optimiser's own is called in an evaluation": _always(
        "optimizer.{method}() must be called outside of an evaluation; got one in hpcdist.consensus, or in a loop over "
        "hpcdist.shard(..., training=False), after which the model has its own parameters again. Call it before, and "
        "its opposite after."
    ),
    "the optimiser wraps one, and is none": _always(
        "optimizer must be a torch.optim.Optimizer; got {kind}, which wraps one. Distribute the one that it wraps, and "
        "wrap the result: {kind}(hpcdist.DistributedOptimizer(optimizer, model), ...); here it is its {name!r}."
    ),
    "a group of parameters is added": Rule(
        "param_groups must stay those that the DistributedOptimizer was made with, as its servers have them; got one "
        "more of {count} parameters. Add it before.",
        lambda contract: contract.updates == "on servers",
    ),
    "parameters are put into a group by hand": _always(
        "param_groups must have the parameters that the DistributedOptimizer was made with; got more or fewer. Add "
        "some by optimizer.add_param_group, which can tell whether they can be added."
    ),
    "the optimiser's state is loaded within an epoch": Rule(
        "optimizer.load_state_dict() must be outside of the training loop with {strategy}, for its servers have the "
        "optimiser's state; got one inside. Do it between epochs, on all ranks.",
        lambda contract: contract.updates == "on servers" and contract.ranks == "some serve",
    ),
    "the optimiser's state differs": Rule(
        "optimizer's state must be loaded on all ranks alike, or on none; rank {first} has that of {own}, and rank "
        "{rank} that of {theirs}. Load it on every rank: rank 0's parameters go to all by themselves, its optimizer's "
        "state does not.",
        error=MismatchError,
    ),
    "an optimiser is distributed twice": _always(
        "optimizer must be a plain torch optimiser; got one that is distributed already."
    ),
    "the optimiser is none of torch's": _always("optimizer must be a torch.optim.Optimizer; got {kind}."),
    "the optimiser takes sparse gradients": _always(
        "optimizer must take dense gradients, which sparse ones become when ranks share them; got SparseAdam. Use Adam "
        "or Adagrad."
    ),
    "the model is missing": _always(
        "model must be the torch.nn.Module that optimizer trains; got {kind}. Pass it second: "
        "DistributedOptimizer(optimizer, model)."
    ),
    "the model is wrapped in DistributedDataParallel": _always(
        "model must not be wrapped in DistributedDataParallel, which averages gradients too; got one that is, or a "
        "part of it. Pass the model itself (model.module), and call it in the loop; or hpcdist.local_shards(model), "
        "where it averages among the ranks of an hpcdist.device_mesh alone. Accelerate wraps none by "
        "accelerator.prepare_model(model, evaluation_mode=True). In place of transformers' Trainer take "
        "hpcdist.hf.Trainer, given a plain optimizer."
    ),
    "two optimisers have one parameter": _always(
        "each parameter must be in one DistributedOptimizer; got {name!r} in two. Give each optimiser its own; or call "
        "hpcdist.finish(model) when the first training has ended."
    ),
    "a plain optimiser trains the rest of the model": Rule(
        "each optimiser in the loop must be a DistributedOptimizer; got parameter {name!r} of the model, which another "
        "one has trained by this rank's gradients alone. Distribute that one, too.",
    ),
    "optimisers of one loop have different workers": Rule(
        "optimizers of one loop must have the same workers; got ranks {ranks}. Use strategies with as many servers, or "
        "none.",
    ),
    "several optimisers share a loop": Rule(
        "a loop with a strategy that evaluates portions of its batches must have one optimizer; got {count}. Give one "
        "optimizer all parameters, or use another strategy.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    # --- models in stages ---------------------------------------------------------------------------------------------
    "the model is in stages": Rule(
        "strategy must step along each stage by itself where a model is in stages; got {strategy}, whose directions "
        "and line search are of all parameters. Take another one.",
        lambda contract: contract.batch == "portions",
    ),
    "micro-batches go to other replicas": Rule(
        "routing must be straight with {strategy} and these options, whose servers take no batches; got random. Leave "
        "it out, or take a strategy without servers, such as allreduce or noloco.",
        lambda contract: contract.ranks == "some serve",
    ),
    "the optimiser of a stage searches along lines": Rule(
        "optimizer must step along each stage by itself where a model is in stages; got {kind}, whose directions and "
        "line search are of all parameters. Use another one.",
    ),
    "the optimiser of a stage has other parameters": Rule(
        "optimizer must have parameters of this rank's stages; got {count} others. Make it of model.parameters(), of "
        "what hpcdist.pipeline or local_shards has returned; a loss with parameters is a last layer.",
    ),
    "the ranks of a replica read different batches": Rule(
        "batches must be the same on all ranks of a replica; ranks {first} and {rank} have read different ones. A "
        "loader that reads its own part must ask for model.grid.replica, not for hpcdist.rank(), and a generator of "
        "its own must have the same seed on all ranks.",
        error=MismatchError,
    ),
    # --- loaders ------------------------------------------------------------------------------------------------------
    "a loader is sharded twice": _always(
        "loader must be a plain DataLoader; got one that is sharded already. Shard it once."
    ),
    "the loader is none of torch's": _always(
        "loader must be a torch DataLoader, whose samples hpcdist.shard splits among the ranks; got {kind}. Make one "
        "of the data set; or pass split=False, where each rank reads its own."
    ),
    "the sampler splits samples already": Rule(
        "loader's sampler must draw from all samples, which hpcdist.shard splits among the ranks; got {kind}, which "
        "splits them among ranks already. Leave it out, or pass split=False.",
    ),
    "a sampler has no end": _always(
        "loader's sampler must end in each epoch where hpcdist.shard deals out its samples; got {kind}, which draws on "
        "after {drawn} samples of a data set of {length}. Let it end after an epoch; or pass split=False, and let each "
        "rank's loader draw samples of its own."
    ),
    "the loader iterates in a way of its own": _always(
        "loader must iterate as torch's DataLoader does where hpcdist.shard deals out its samples; got {kind}, which "
        "has its own {name}. Pass split=False, and let each rank's loader read samples of its own, such as "
        "indices[hpcdist.rank()::hpcdist.size()]; or pass a DataLoader of its data set."
    ),
    "batches can't be compared": Rule(
        "batches must be picklable where ranks compare whether they read the same ones, as of an IterableDataset; got "
        "{kind}, which is not. Pass split=False, and let each rank read samples of its own.",
    ),
    "a split has another name": _always(
        "split must be True, False or 'dirichlet'; got {split!r}. Leave it out to deal out any sample to any rank."
    ),
    "a sampler draws what is split by label": _always(
        "loader must deal out a map-style data set in order, or shuffled, where it is split by label; got a sampler or "
        "a stream, which draws by itself. Leave the sampler out, or the split."
    ),
    "joint batches are split by label": Rule(
        "samples must be any worker's with {strategy}, where all compute parts of one joint batch; got a split by "
        "label. Leave the split out, or take {others}.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "the loader draws batches, or reads its own samples": Rule(
        "loader must deal out single samples of a map-style data set with a strategy that evaluates portions of a "
        "joint batch; got one that draws batches, or reads its own samples. Pass a batch_size.",
        lambda contract: contract.batch == "portions",
        alone=True,
    ),
    "the loader is iterated before an optimiser is distributed": _always(
        "a sharded loader must be iterated after hpcdist.DistributedOptimizer, which says which ranks train, and "
        "before hpcdist.finish; got no optimiser that is distributed. For an evaluation pass training=False."
    ),
    "a training loader is iterated for an evaluation": Rule(
        "loader must be one for evaluations in a loop that only runs the model; got a training loader, and neither "
        "backward() nor step(), so that each rank has seen its own samples only. Use hpcdist.shard(loader, "
        "training=False), and hpcdist.metric for the figures of all ranks; or iterate inside torch.no_grad(), where "
        "each rank gets all samples.",
    ),
    "update_bn reads samples of each rank's own": Rule(
        "update_bn must be given a loader of all samples for a {model} that no DistributedOptimizer trains, whose "
        "running statistics no rank averages; got one made by split=False, of this rank's samples. Pass a plain "
        "DataLoader of all samples.",
    ),
    "batch norm's statistics change in an evaluation": _always(
        "model must be in eval() mode in an evaluation, hpcdist.consensus or hpcdist.shard(..., training=False), after "
        "which it has its own buffers again; got batch norm's running statistics that have changed. Call model.eval() "
        "first; call update_bn outside of an evaluation."
    ),
    "the weight of a batch is set in the loader": _always(
        "loader.weight must be left as it is; got {value}. Call optimizer.set_batch_weight(n), with the number of "
        "samples or tokens that this rank's loss is a mean over."
    ),
    "workers read different data": Rule(
        "loader must be the same on all workers, which share its samples; {name} is {own} on rank {first} and {theirs} "
        "on rank {rank}. Build it alike everywhere, with one seed for random_split and permutations; or pass "
        "split=False, where each rank's loader reads samples of its own.",
        error=MismatchError,
    ),
    # --- transformers' Trainer ----------------------------------------------------------------------------------------
    "the Trainer distributes the model itself": _always(
        "{name} of TrainingArguments must be omitted with hpcdist.hf.Trainer, whose strategy shares samples and "
        "averages; got {value!r}, by which the Trainer distributes by itself, or one rank goes another way than the "
        "others. Leave it out."
    ),
    "a run is resumed on other workers": _always(
        "resume_from_checkpoint must be a run of as many workers as there are, for the Trainer finds its place by "
        "counting their steps; got one of {saved} workers on {count}. Start {saved}; or load the model by "
        "from_pretrained and train on without resuming."
    ),
    "an epoch of a stream is left for an evaluation": Rule(
        "train_dataset must have a length where ranks serve and the Trainer evaluates or saves within an epoch; got an "
        "IterableDataset, which can't go on where it was left. Evaluate and save at the end (eval_strategy and "
        "save_strategy 'no' or 'epoch'), or take a strategy without servers.",
        lambda contract: contract.ranks == "some serve",
    ),
    # --- places in the loop -------------------------------------------------------------------------------------------
    "ranks are at different places in the loop": Rule(
        "ranks must go through the loop alike; rank {first} is {place} and rank {rank} {other}. Decide for all ranks "
        "together when to stop or to evaluate: by hpcdist.metric, or what hpcdist.broadcast sends.{serving}",
        error=MismatchError,
    ),
    "a call of all ranks stands inside the loop": Rule(
        "{call} must be outside of the training loop where ranks serve, for they can't take part inside it; got one "
        "inside. Do it between epochs: after the loop over hpcdist.shard(loader).",
        lambda contract: contract.ranks == "some serve",
    ),
    "ranks that serve are called by torch.distributed": Rule(
        "calls of torch.distributed must be outside of the training loop where ranks serve, and never make them; got "
        "one that needs rank {serving}. Call hpcdist.allreduce, allgather, broadcast or metric there, which workers "
        "share; or give the call, or a metric's process_group, dist.new_group({workers}), made before the loop.",
        lambda contract: contract.ranks == "some serve",
    ),
    "the model is trained by no distributed optimiser": _always(
        "model must be one that a DistributedOptimizer trains; got another one, or one that ranks have changed since "
        "its end. Pass the module that DistributedOptimizer was given."
    ),
}
