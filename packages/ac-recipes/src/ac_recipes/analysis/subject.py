"""What a recipe trains, as something that ac-core can look at: a model from a batch to its loss, and a batch.

With values, as on one process of this machine (`real_subject`), or without, at any size (`step_settings`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ac_core import ActivationCheckpointingError
from ac_moe import MoEConfig
from ac_recipes.data.prepare import prepare_here
from ac_recipes.errors import UsageError
from ac_recipes.images.config import DigitsDatasetConfig
from ac_recipes.installed import check_installed, check_installed_for_shapes
from ac_recipes.lora import add_lora
from ac_recipes.parallel.experts import share_experts
from ac_recipes.pretrained import load_config, load_tokenizer
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan, GlobalOrder, check_filled
from ac_recipes.training.freeze import freeze
from ac_recipes.training.loss import HeadLoss, attach_loss, check_backend
from ac_recipes.training.model import build_model, trainable_model
from ac_recipes.training.preflight import setup_of
from ac_recipes.training.ranks import local_device

Device = Literal["cuda", "cpu"]
Kernels = Literal["plain", "fused"]
_TOKENIZER = "tokenizer.pretrained_model_name_or_path"


class LossForward:
    """Stands in for the forward of a model on whose head `head_loss` is: from a batch with `labels` to its mean loss.

    label_tokens: by which the sum of the loss is divided.
    """

    def __init__(self, model: nn.Module, head_loss: HeadLoss, label_tokens: int) -> None:
        self._forward = model.forward
        self._head_loss = head_loss
        self._label_tokens = label_tokens

    def __call__(self, labels: Tensor, **inputs: Any) -> Tensor:
        with self._head_loss.labels(labels, self._label_tokens):
            output = self._forward(**inputs)
        return self._head_loss.total(output)


@dataclass(frozen=True)
class Subject:
    """`model(**batch)` is the loss of the first local batch that a run of the recipe would see, with the weights that
    the run would begin with."""

    recipe: Recipe
    model: nn.Module
    batch: dict[str, Any]
    device: torch.device


def real_subject(recipe: Recipe) -> Subject:
    """The recipe's model and batch on this machine, checkpointing not applied.

    Raises:
        UsageError: the recipe does not fit one process, or its model or data cannot be had.
    """
    for name in ("dp_size", "dp_replicate_size", "tp_size", "ep_size"):
        if (size := getattr(recipe.distributed, name) or 1) != 1:
            with_it = " --model.backend null" if name == "ep_size" and recipe.model.backend is not None else ""
            raise UsageError(
                f"distributed.{name}: {size} ranks are asked for, and this command runs on one process; add "
                f"--distributed.{name} 1{with_it}"
            )
    check_installed(recipe)
    check_backend(recipe, local_device())
    setup_of(recipe).layout(1)
    plan = BatchPlan.of(recipe.step_scheduler, 1)
    data = prepare_here(recipe)
    check_filled(recipe.step_scheduler, len(data.train))
    order = GlobalOrder(len(data.train), recipe.step_scheduler.global_batch_size, recipe.rng.seed)
    device = local_device()
    model, _ = trainable_model(recipe, data, device)
    head_loss = attach_loss(model, recipe.loss_fn)
    batch = {name: tensor.to(device) for name, tensor in data.train[order.batch(0)[: plan.local]].items()}
    label_tokens = max(1, int((batch["labels"] != recipe.loss_fn.ignore_index).sum()))
    model.forward = LossForward(model, head_loss, label_tokens)
    return Subject(recipe, model, batch | {"use_cache": False}, device)


def step_settings(
    recipe: Recipe, *, device: Device, kernels: Kernels, expert_load: float | None = None
) -> dict[str, Any]:
    """The arguments with which `ac_core.estimate` and `ac_core.plan` see a step of one rank as the recipe has it.

    expert_load: as for `ac_core.estimate`; None: an even share.

    Raises:
        UsageError: a package is missing; sizes that cannot be estimated, or that the batch cannot be shared by; an
            `expert_load` that no rank can have.
    """
    asked = recipe.distributed
    for name in ("tp_size", "cp_size", "pp_size"):
        if getattr(asked, name) != 1:
            raise UsageError(f"distributed.{name}: {getattr(asked, name)} cannot be estimated yet; leave it at 1")
    if asked.strategy == "megatron_fsdp":
        raise UsageError("distributed.strategy: 'megatron_fsdp' cannot be estimated; 'fsdp2' shards the same")
    check_installed_for_shapes(recipe)
    if device == local_device().type:  # of another machine it is not known what is installed
        check_backend(recipe, local_device())
    ranks = asked.dp_size or asked.ep_size  # without a dp_size, as few ranks as can share the experts
    if ranks % asked.dp_replicate_size:
        raise UsageError(
            f"distributed.dp_replicate_size: the {ranks} ranks of dp_size cannot be divided into "
            f"{asked.dp_replicate_size} groups"
        )
    plan = BatchPlan.of(recipe.step_scheduler, ranks)
    batch, fields = shape_batch(recipe, plan.local)
    settings: dict[str, Any] = {
        "batch": batch,
        "dtype": None,  # as the recipe's model has it
        "optimizer": recipe.optimizer.name,
        "strategy": "none" if ranks == 1 else asked.strategy,
        "dp_size": ranks // asked.dp_replicate_size if asked.strategy == "fsdp2" else ranks,
        "gradient_accumulation_steps": plan.accumulation,
        "loss": recipe.loss_fn.kind,
        "kernels": kernels,
        "device": device,
    }
    if asked.ep_size > 1:
        settings |= {"ep_size": asked.ep_size, "share_experts": partial(_share_experts, recipe.model.backend)}
    if expert_load is not None:
        if asked.ep_size == 1:
            raise UsageError(f"--expert-load: {expert_load:g} is for ranks that share experts; ep_size is 1")
        if not 1 <= expert_load <= asked.ep_size:
            raise UsageError(
                f"--expert-load: {expert_load:g} is not between 1, an even share of the rows, and {asked.ep_size}, the "
                "ranks of distributed.ep_size, of which one would get all"
            )
        settings["expert_load"] = expert_load
    return settings | {"model": lambda: _model_without_values(recipe, fields)}


def _share_experts(backend: MoEConfig | None, model: nn.Module, grid: DeviceMesh) -> Callable[[], Any]:
    """As a run does it, on simulated ranks of the CPU. Of blocks that keep everything the context is not asked for."""
    cpu = torch.device("cpu")
    backend = backend or MoEConfig()
    shared, _ = share_experts(model, backend, grid["ep"], grid["expert_copies"], device=cpu, checkpointing=True)
    return shared.context_fn


def shape_batch(recipe: Recipe, local_batch_size: int) -> tuple[dict[str, Any], dict[str, int]]:
    """A batch of the size that the recipe trains on, and what the data adds to the model's configuration.

    What stands in it does not matter, unless the model looks at it: where images are placed among the tokens.
    """
    if isinstance(recipe.dataset, DigitsDatasetConfig):
        data = prepare_here(recipe)
        return data.train[torch.arange(local_batch_size)] | {"use_cache": False}, data.model_fields
    tokens = torch.zeros(local_batch_size, recipe.row_length, dtype=torch.int64)
    batch = {"input_ids": tokens, "use_cache": False, "labels": tokens.clone()}
    if recipe.packed_sequence.packed_sequence_size:
        # Two examples a row: however many there are, it is then that the model makes a mask of all pairs of tokens.
        positions = torch.arange(recipe.row_length) % -(-recipe.row_length // 2)
        batch["position_ids"] = positions.repeat(local_batch_size, 1)
    return batch, {}


@contextmanager
def refused_as_usage() -> Iterator[None]:
    """What ac-core refuses of the recipe's checkpointing is a mistake in the recipe."""
    try:
        yield
    except ActivationCheckpointingError as error:
        raise UsageError(f"distributed.activation_checkpointing: {error}") from error


def vocabulary(recipe: Recipe) -> int:
    """Entries of the tokenizer: those that a pretrained one has, or that the one to train is asked for."""
    name = recipe.tokenizer.pretrained_model_name_or_path
    return recipe.tokenizer.vocab_size if name is None else len(load_tokenizer(name, _TOKENIZER))


def _model_without_values(recipe: Recipe, fields: dict[str, int]) -> nn.Module:
    """To be called with fake tensors on. A plain loss is the recipe's own; ac-core models the fused one, which looks at
    the labels to choose its chunks."""
    config, vocab_size = recipe.model, vocabulary(recipe)
    if config.pretrained_model_name_or_path is not None:
        known = config.config
        if known is None or "vocab_size" not in (known.get("text_config") or known):
            known = load_config(config.pretrained_model_name_or_path).to_dict()
        config, vocab_size = replace(config, pretrained_model_name_or_path=None, config=known), 1
    model = build_model(config, vocab_size, recipe.rng.seed, torch.device("cpu"), fields)
    freeze(model, recipe.freeze_config)
    if recipe.peft is not None:
        add_lora(model, recipe.peft, recipe.rng.seed)
    if recipe.loss_fn.kind == "plain":
        head = model.get_output_embeddings()
        head.forward = head_loss = HeadLoss(head, recipe.loss_fn)
        model.forward = LossForward(model, head_loss, 1)
    return model
