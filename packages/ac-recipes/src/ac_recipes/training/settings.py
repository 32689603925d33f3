"""The rows of the asked -> applied table."""

import torch

from ac_recipes.data.config import TextDatasetConfig
from ac_recipes.data.prepare import Prepared
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.parallel.setup import Parallel
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.console import Row
from ac_recipes.training.memory import PeakMemory
from ac_recipes.training.ranks import Ranks


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
            " + ".join(sorted(applied)) or "none",
            f"{len(report.applied_blocks)} of {total} blocks, scope {', '.join(report.scope)}",
        )
    ]
    rows += [
        (
            f"  {group.label}",
            group.asked,
            group.applied,
            f"{len(group.blocks)} blocks, {group.part}, found by {group.why}{'; ' * bool(group.reason)}{group.reason}",
        )
        for group in report.groups
    ]
    rows += [("  ", "", "", note) for note in report.notes]
    rows += [*parallel.rows, _loss(recipe, ranks.device), *_batch(recipe, plan)]
    rows += [_vocabulary(recipe, data), _data(recipe, data)]
    device = f"{torch.get_num_threads()} threads" if ranks.device.type == "cpu" else torch.cuda.get_device_name()
    rows.append(("device", "auto", ranks.device.type, f"{device}; mem = {memory.source}"))
    rows.append(("dtype", recipe.model.dtype, recipe.model.dtype, "parameters, gradients and computation"))
    return rows


def _vocabulary(recipe: Recipe, data: Prepared) -> Row:
    applied = len(data.tokenizer)
    pretrained = recipe.tokenizer.pretrained_model_name_or_path or recipe.model.pretrained_model_name_or_path
    if pretrained is not None:
        return ("vocabulary", "pretrained", str(applied), pretrained)
    why = "" if applied == recipe.tokenizer.vocab_size else "the text gives no more merges"
    return ("vocabulary", str(recipe.tokenizer.vocab_size), str(applied), why)


def _data(recipe: Recipe, data: Prepared) -> Row:
    config = recipe.dataset
    if isinstance(config, DigitsDatasetConfig):
        name = config.kind
    elif isinstance(config, TextDatasetConfig):
        name = config.text if isinstance(config.text, str) else f"{len(config.text)} files"
    else:
        name = config.sources[0] if len(config.sources) == 1 else f"{len(config.sources)} files"
    return ("dataset" if name == config.kind else config.kind, name, name, data.detail)


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
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    shares = f"{ranks} x {plan.accumulation} accumulated x {plan.local}"
    shrunk = "" if plan.local == schedule.local_batch_size else "all that a rank has of a global batch"
    return [
        ("global batch", size, size, f"{shares} sequences of {recipe.row_length} tokens"),
        ("local batch", str(schedule.local_batch_size), str(plan.local), shrunk),
    ]
