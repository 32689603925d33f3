"""The rows of the asked -> applied table: at least one for every section of the recipe."""

import re

import torch

from ac_core.sizes import counted
from ac_recipes.data.config import VALIDATION_FRACTION, DatasetConfig, TextDatasetConfig
from ac_recipes.data.packing import Packed
from ac_recipes.data.prepare import Prepared
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.parallel.setup import Parallel
from ac_recipes.planned import planned_text
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan, limited
from ac_recipes.training.console import Row
from ac_recipes.training.memory import PeakMemory
from ac_recipes.training.optimizer import warmup_steps
from ac_recipes.training.ranks import Ranks

_WIDEST = 32
"""Characters of a name in a column of its own."""


def settings_table(  # noqa: PLR0917 - one argument for every part of the run that a row speaks of
    recipe: Recipe,
    parallel: Parallel,
    plan: BatchPlan,
    ranks: Ranks,
    data: Prepared,
    memory: PeakMemory,
) -> list[Row]:
    """Every setting that decides what the run computes and keeps: asked, applied, and why or how."""
    report = parallel.report
    total = sum(len(group.blocks) for group in report.groups)
    applied = {group.applied for group in report.groups if group.applied != "none"}
    rows: list[Row] = [
        (
            "activation checkpointing",
            report.policy,
            _breakable(" + ".join(sorted(applied))) or "none",
            f"{len(report.applied_blocks)} of {counted(total, 'block')}, scope {', '.join(report.scope)}",
        )
    ]
    rows += [
        (
            f"  {group.label}",
            _breakable(group.asked),
            _breakable(group.applied),
            f"{counted(len(group.blocks), 'block')}, {group.part}, found by {group.why}"
            f"{'; ' * bool(group.reason)}{group.reason}",
        )
        for group in report.groups
    ]
    rows += [("  ", "", "", note) for note in report.notes]
    rows += _budget(recipe, plan)
    rows += [*parallel.rows, *_model(recipe, parallel), _loss(recipe, ranks.device), *_batch(recipe, plan)]
    rows += [*_steps(recipe, data), _vocabulary(recipe, data), *_data(recipe, data), *_kept(recipe)]
    device = counted(torch.get_num_threads(), "thread") if ranks.device.type == "cpu" else torch.cuda.get_device_name()
    rows.append(("device", "auto", ranks.device.type, f"{device}; mem = {memory.source}"))
    rows.append(("dtype", recipe.model.dtype, recipe.model.dtype, "parameters, gradients and computation"))
    return rows


def _budget(recipe: Recipe, plan: BatchPlan) -> list[Row]:
    """What the plan is for: its budget is asked for, and the plan applied."""
    config = recipe.distributed.checkpointing
    if config.policy != "budget":
        return []
    budget = "none" if config.memory_budget is None else str(config.memory_budget)
    return [("  memory budget", budget, budget, planned_text(recipe, plan.world_size))]


def _vocabulary(recipe: Recipe, data: Prepared) -> Row:
    applied = len(data.tokenizer)
    pretrained = recipe.tokenizer.pretrained_model_name_or_path or recipe.model.pretrained_model_name_or_path
    if pretrained is not None:
        return ("vocabulary", "pretrained", str(applied), pretrained)
    why = "" if applied == recipe.tokenizer.vocab_size else "the text gives no more merges"
    return ("vocabulary", str(recipe.tokenizer.vocab_size), str(applied), why)


def _data(recipe: Recipe, data: Prepared) -> list[Row]:
    config, every = recipe.dataset, recipe.step_scheduler.val_every_steps
    name = _source(config)
    rows = [("dataset" if name == config.kind else config.kind, name, name, data.detail)]
    if size := recipe.packed_sequence.packed_sequence_size:
        applied = f"{data.train.size} tokens" if isinstance(data.train, Packed) else "none"
        rows.append(("packed rows", f"{size} tokens", applied, "no example of a row sees another"))
    if recipe.validation_dataset is not None:
        asked = _source(recipe.validation_dataset)
    else:
        fraction = config.validation_fraction
        asked = f"{VALIDATION_FRACTION if fraction is None else fraction:g} of it"
    if not (held_out := len(data.validation)):
        unused = "" if every is None else f"; val_every_steps {every} has no effect"
        return [*rows, ("validation", asked, "off", f"no data is held out{unused}")]
    when = "after the last step" if every is None else _every(every)
    return [*rows, ("validation", asked, counted(held_out, "row"), when)]


def _source(config: DatasetConfig) -> str:
    if isinstance(config, DigitsDatasetConfig):
        return config.kind
    if isinstance(config, TextDatasetConfig):
        return config.text if isinstance(config.text, str) else counted(len(config.text), "file")
    sources = config.sources  # each may be a pattern, or a dataset of many files
    return _short(sources[0]) if len(sources) == 1 else counted(len(sources), "source")


def _short(name: str) -> str:
    """The end of a long path, so that a column of the table stays narrow."""
    return name if len(name) <= _WIDEST else name.rpartition("/")[2]


def _model(recipe: Recipe, parallel: Parallel) -> list[Row]:
    asked, lora = recipe.model, recipe.peft
    model = getattr(parallel.model, "module", parallel.model)  # DDP and Megatron-FSDP hold it, FSDP2 is it
    name = asked.pretrained_model_name_or_path
    rows = [
        (
            "model",
            _short(name) if name else asked.config["model_type"],
            model.config.model_type,
            f"pretrained, {name}" if name else "new weights",
        ),
        # What transformers chose has no public name.
        ("attention", asked.attn_implementation, model.config._attn_implementation, ""),
    ]
    if lora is not None:
        said = f"dim {lora.dim}, alpha {lora.alpha}"
        layers = sum("lora_A" in name for name, _ in model.named_parameters())
        modules = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
        where = f"{counted(layers, 'layer')} ({modules})"
        rows.append(("lora", said, said, f"{where}, dropout {lora.dropout:g}; no more is trained"))
    return rows


def _steps(recipe: Recipe, data: Prepared) -> list[Row]:
    schedule, optimizer, rates = recipe.step_scheduler, recipe.optimizer, recipe.lr_scheduler
    steps = limited(schedule, len(data.train)).max_steps
    epochs = f"num_epochs {schedule.num_epochs} ends it" if steps < schedule.max_steps else ""
    decay = "" if rates.lr_decay_style == "constant" else f", then down to {rates.min_lr:g}"
    warming = warmup_steps(steps, rates)
    warm_up = f"{optimizer.lr:g} after a warm-up of {counted(warming, 'step')}{decay}"
    if warming > steps:
        warm_up = f"the run ends within its warm-up of {warming} steps, at {optimizer.lr * steps / warming:.3g}"
    betas = " and ".join(f"{beta:g}" for beta in optimizer.betas)
    decayed = f"betas {betas}; weight decay {optimizer.weight_decay:g} of matrices"
    norm = recipe.clip_grad_norm.max_norm
    limit = "none" if norm is None else f"{norm:g}"
    return [
        ("steps", str(schedule.max_steps), str(steps), epochs),
        ("optimizer", optimizer.name, optimizer.name, decayed),
        ("learning rate", rates.lr_decay_style, rates.lr_decay_style, warm_up),
        ("largest gradient norm", limit, limit, ""),
        ("seed", str(recipe.rng.seed), str(recipe.rng.seed), "of the weights, the data order and dropout"),
    ]


def _kept(recipe: Recipe) -> list[Row]:
    config, every = recipe.checkpoint, recipe.step_scheduler.ckpt_every_steps
    asked = "none" if not config.enabled else "after the last step" if every is None else _every(every)
    kept = "all are kept" if config.keep_last is None else f"the newest {config.keep_last} are kept"
    best = f", and the best {config.keep_best}" * bool(config.keep_best)
    rows = [("checkpoints", asked, asked, f"{kept}{best}" if config.enabled else "the run cannot be resumed")]
    if (board := recipe.tensorboard) is not None:
        rows.append(("tensorboard", "on", "on", board.log_dir or "in the run folder"))
    if (wandb := recipe.wandb) is not None:
        rows.append(("wandb", wandb.mode or "on", wandb.mode or "on", wandb.project))
    return rows


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _breakable(names: str) -> str:
    """With a space after every comma, where a line may end: a long list is wrapped between names, not inside of one."""
    return re.sub(r",(?=\S)", ", ", names)


def _loss(recipe: Recipe, device: torch.device) -> Row:
    loss = recipe.loss_fn
    if loss.kind == "plain":
        return ("loss", "plain", "plain", "from whole logits")
    # Without a GPU `auto` is the torch backend; which one a GPU's inputs get is decided call by call.
    applied = "torch" if loss.backend == "auto" and device.type == "cpu" else loss.backend
    return ("loss", f"fused, {loss.backend}", f"fused, {applied}", f"logits never whole; {loss.accum} accumulation")


def _batch(recipe: Recipe, plan: BatchPlan) -> list[Row]:
    schedule = recipe.step_scheduler
    size = str(schedule.global_batch_size)
    shares = f"{counted(plan.world_size, 'rank')} x {plan.accumulation} accumulated x {plan.local}"
    shrunk = "" if plan.local == schedule.local_batch_size else "all that a rank has of a global batch"
    return [
        ("global batch", size, size, f"{shares} sequences of {counted(recipe.row_length, 'token')}"),
        ("local batch", str(schedule.local_batch_size), str(plan.local), shrunk),
    ]
