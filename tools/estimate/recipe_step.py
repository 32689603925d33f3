"""What a step of a recipe really takes, on one process or on several, through the code that trains it."""

import json
import multiprocessing
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ac_core.estimation.experts import expert_modules
from ac_core.estimation.routing import Routing
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

_STEPS = 3
"""The last of which is looked at."""
_PATIENCE = 600
"""Seconds for ranks to end by themselves."""


Route = Literal["weights", "evenly"]
"""Where tokens go among experts that are shared over ranks: where the weights send them, or as an estimate assumes."""


@dataclass(frozen=True)
class Measured:
    """peak: the most bytes alive in the step. routed: the tokens of this rank that went to each expert, in each call of
    a layer of experts."""

    peak: int
    routed: list[list[int]]


def real_step(recipe: Recipe, ranks: int, *, random: bool = False, route: Route = "weights") -> list[Measured]:
    """A step of `recipe` on each of `ranks` CPU processes, its checkpointing applied.

    random: weights and tokens are drawn, at the sizes that the recipe says, where those it names are not here.
    """
    if ranks == 1:
        return [_measured(recipe, random=random, route=route)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        outcomes = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(recipe, route, _environment(rank, ranks, port), outcomes[rank]))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(_PATIENCE)
        finally:
            for process in processes:
                process.kill()
        return [Measured(**json.loads(outcome.read_text())) for outcome in outcomes]


def busiest_load(measured: list[Measured]) -> float:
    """The rows that the experts of the busiest rank got, over an even share: the most of any layer."""
    most = 0.0
    for calls in zip(*(rank.routed for rank in measured), strict=True):
        by_expert = torch.tensor(calls).sum(0)
        most = max(most, float(by_expert.view(len(measured), -1).sum(-1).max() / by_expert.sum()) * len(measured))
    return most


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torch's launcher tells a process."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    return own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _rank(recipe: Recipe, route: Route, environment: dict[str, str], outcome: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    outcome.write_text(json.dumps(asdict(_measured(recipe, random=False, route=route))))
    os._exit(0)  # gloo's group may wait for Python at its end, as Python does for it


class _Router:
    """A hook before experts, `(hidden_states, top_k_index, top_k_weights)`: routes as told and notes where to."""

    def __init__(self, route: Route, ranks: int) -> None:
        self.route = route
        self.even = Routing(ranks)
        self.routed: list[list[int]] = []

    def __call__(self, experts: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = given
        if self.route == "evenly":
            index = self.even.choose(index.shape, experts.num_experts)
        self.routed.append(index.flatten().bincount(minlength=experts.num_experts).tolist())
        return hidden, index, weights


def _measured(recipe: Recipe, *, random: bool, route: Route) -> Measured:
    with joined_ranks() as ranks:
        router = _Router(route, ranks.world_size)
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
            if ranks.world_size > 1:
                for experts in expert_modules(model):
                    experts.register_forward_pre_hook(router)
            return setup_of(recipe).apply(model, ranks).model

        def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
            inputs: dict[str, Any] = {name: value for name, value in given.items() if name != "labels"}
            with head_loss[0].labels(given["labels"], 1):
                output = model(**inputs | {"use_cache": False})
            return head_loss[0].total(output)

        peak = peak_of_step(
            build,
            {name: value for name, value in batch.items() if isinstance(value, Tensor)},
            loss_of,
            lambda parameters: build_optimizer(parameters, recipe.optimizer),
            steps=_STEPS,
            microbatches=plan.accumulation,
            threads=ranks.world_size > 1,
        )
        return Measured(peak, router.routed[-len(router.routed) // _STEPS :])
