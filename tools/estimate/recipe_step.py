"""What a step of a recipe really takes, on one process or on several, through the code that trains it."""

import multiprocessing
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ac_recipes.analysis.subject import shape_batch
from ac_recipes.data.prepare import prepare_here
from ac_recipes.lora import add_lora
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan, GlobalOrder
from ac_recipes.training.loss import HeadLoss, attach_loss
from ac_recipes.training.model import build_model, trainable_model
from ac_recipes.training.optimizer import build_optimizer
from ac_recipes.training.preflight import setup_of
from ac_recipes.training.ranks import joined_ranks
from tools.estimate.truth import peak_of_step

_PATIENCE = 600
"""Seconds for ranks to end by themselves."""


def real_peaks(recipe: Recipe, ranks: int, *, random: bool = False) -> list[int]:
    """The most bytes alive in a step of `recipe` on each of `ranks` CPU processes, its checkpointing applied.

    random: weights and tokens are drawn, at the sizes that the recipe says, where those it names are not here.
    """
    if ranks == 1:
        return [_peak(recipe, random=random)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        outcomes = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(recipe, rank, ranks, port, outcomes[rank])) for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(_PATIENCE)
        finally:
            for process in processes:
                process.kill()
        return [int(outcome.read_text()) for outcome in outcomes]


def _rank(recipe: Recipe, rank: int, ranks: int, port: int, outcome: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outcome.write_text(str(_peak(recipe, random=False)))
    os._exit(0)  # gloo's group may wait for Python at its end, as Python does for it


def _peak(recipe: Recipe, *, random: bool) -> int:
    with joined_ranks() as ranks:
        plan = BatchPlan.of(recipe.step_scheduler, ranks.world_size)
        data = None if random else prepare_here(recipe)
        if data is None:
            batch, _ = shape_batch(recipe, plan.local)
            batch["input_ids"].random_(recipe.model.config["vocab_size"])
        else:
            order = GlobalOrder(len(data.train), recipe.step_scheduler.global_batch_size, recipe.rng.seed)
            batch = data.train[order.batch(0).chunk(ranks.world_size)[ranks.rank][: plan.local]]
        head_loss: list[HeadLoss] = []

        def build() -> nn.Module:
            if data is None:
                model = build_model(recipe.model, 1, recipe.rng.seed, ranks.device)
                if recipe.peft is not None:
                    add_lora(model, recipe.peft, recipe.rng.seed)
            else:
                model, _ = trainable_model(recipe, data, ranks.device)
            head_loss.append(attach_loss(model, recipe.loss_fn))
            return setup_of(recipe).apply(model, ranks).model

        def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
            inputs: dict[str, Any] = {name: value for name, value in given.items() if name != "labels"}
            with head_loss[0].labels(given["labels"], 1):
                output = model(**inputs | {"use_cache": False})
            return head_loss[0].total(output)

        return peak_of_step(
            build,
            {name: value for name, value in batch.items() if isinstance(value, Tensor)},
            loss_of,
            lambda parameters: build_optimizer(parameters, recipe.optimizer),
            microbatches=plan.accumulation,
        )
