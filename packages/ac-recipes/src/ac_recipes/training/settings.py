"""The rows of the asked -> applied table."""

import torch
from tokenizers import Tokenizer

from ac_core import Report
from ac_recipes.data.prepare import Prepared
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.console import Row
from ac_recipes.training.memory import PeakMemory
from ac_recipes.training.ranks import Ranks


def settings_table(  # noqa: PLR0917 - one argument for every part of the run that a row speaks of
    recipe: Recipe,
    report: Report,
    plan: BatchPlan,
    ranks: Ranks,
    data: Prepared,
    memory: PeakMemory,
) -> list[Row]:
    """Every setting that decides what the run computes and keeps: asked, applied, and why or how."""
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
    rows += [_strategy(recipe, ranks), _loss(recipe), *_batch(recipe, plan), _vocabulary(recipe, data.tokenizer)]
    rows.append(_data(recipe, data))
    device = f"{torch.get_num_threads()} threads" if ranks.device.type == "cpu" else torch.cuda.get_device_name()
    rows.append(("device", "auto", ranks.device.type, f"{device}; mem = {memory.source}"))
    rows.append(("dtype", recipe.model.dtype, recipe.model.dtype, "parameters, gradients and computation"))
    return rows


def _strategy(recipe: Recipe, ranks: Ranks) -> Row:
    asked = recipe.distributed.strategy
    if ranks.world_size == 1:
        return ("strategy", asked, "none", "one process: nothing to shard and no gradient to average")
    return ("strategy", asked, asked, f"{ranks.world_size} ranks")


def _vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> Row:
    asked, applied = recipe.tokenizer.vocab_size, tokenizer.get_vocab_size()
    why = "" if applied == asked else "the text gives no more merges"
    return ("vocabulary", str(asked), str(applied), why)


def _data(recipe: Recipe, data: Prepared) -> Row:
    dataset = recipe.dataset
    if isinstance(dataset, DigitsDatasetConfig):
        return ("dataset", dataset.kind, dataset.kind, data.detail)
    text = dataset.text if isinstance(dataset.text, str) else f"{len(dataset.text)} files"
    return ("text", text, text, data.detail)


def _loss(recipe: Recipe) -> Row:
    loss = recipe.loss_fn
    if loss.kind == "plain":
        return ("loss", "plain", "plain", "from whole logits")
    return ("loss", f"fused, {loss.backend}", "fused, torch", f"logits never whole; {loss.accum} accumulation")


def _batch(recipe: Recipe, plan: BatchPlan) -> list[Row]:
    schedule = recipe.step_scheduler
    size = str(schedule.global_batch_size)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    shares = f"{ranks} x {plan.accumulation} accumulated x {plan.local}"
    shrunk = "" if plan.local == schedule.local_batch_size else "all that a rank has of a global batch"
    return [
        ("global batch", size, size, f"{shares} sequences of {recipe.dataset.sequence_length} tokens"),
        ("local batch", str(schedule.local_batch_size), str(plan.local), shrunk),
    ]
