"""Predicted peaks against real ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ac_core
from ac_core.estimation.losses import find_head
from ac_core.estimation.ranks import simulated_ranks
from tools.estimate import models
from tools.estimate.models import Model
from tools.estimate.truth import peak_of_step


@dataclass(frozen=True)
class Case:
    """One step to predict and to run. optimizer, strategy: as for `ac_core.estimate`."""

    model: str
    policy: str
    loss: str = "plain"
    optimizer: str = "adamw"
    strategy: str = "none"


@dataclass(frozen=True)
class Outcome:
    """Bytes of the peak."""

    case: Case
    dtype: str
    predicted: int
    real: int

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1


_MODELS: dict[str, Callable[[], Model]] = {
    "Llama": models.llama,
    "Qwen3": models.qwen3,
    "Gemma2, eager attention": models.gemma2,
    "GPT-2, dropout": models.gpt2,
    "T5": models.t5,
    "Qwen3-MoE": models.qwen3_moe,
    "DeepSeek-V3, shared expert": models.deepseek_v3,
    "Mixtral, loop over experts": models.mixtral_loop,
    "LLaVA": models.llava,
    "LLaVA, frozen tower": partial(models.llava, frozen=True),
    "Qwen2.5-VL": models.qwen2_5_vl,
    "SmolVLM": models.smolvlm,
    "Llama, packed rows": models.packed,
    "Llama with LoRA": models.llama_lora,
}

CASES = [
    *(Case("Llama", policy, loss) for loss in ("plain", "fused") for policy in ("none", "full", "selective")),
    Case("Llama", "full", optimizer="sgd+momentum"),
    Case("Llama", "full", optimizer="none"),
    Case("Llama", "full", strategy="ddp"),
    Case("Llama", "none", strategy="fsdp2"),
    Case("Llama", "full", "fused", strategy="fsdp2"),
    *(Case("Qwen3", policy, loss) for policy, loss in (("none", "plain"), ("full", "fused"), ("selective", "fused"))),
    *(Case(name, policy) for name in list(_MODELS)[2:] for policy in ("none", "full", "selective")),
    *(Case(name, "full", "fused") for name in ("Qwen3-MoE", "LLaVA", "Llama with LoRA")),
    *(Case(name, "budget") for name in ("Llama", "Qwen3-MoE", "LLaVA", "Llama with LoRA")),
    *(Case(name, "budget", "fused") for name in ("Llama", "Qwen3-MoE", "LLaVA")),
    Case("Llama", "budget", strategy="fsdp2"),
]
_BUDGET = 0.9
"""Of the peak without checkpointing: where plans mix."""
_RANKS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compare(case: Case, dtype: str) -> Outcome:
    """Predict, run, and set the one beside the other."""
    model = _MODELS[case.model]()
    number = DTYPES[dtype]
    batch = {name: value.to(number) if value.is_floating_point() else value for name, value in model.batch.items()}
    settings: dict[str, Any] = {
        "batch": batch,
        "dtype": number,
        "loss": case.loss,
        "optimizer": case.optimizer,
        "strategy": case.strategy,
        "dp_size": 1 if case.strategy == "none" else _RANKS,
        "device": "cpu",
    }
    policy: Any = case.policy
    if policy == "budget":
        plan = ac_core.plan(model.build, budget=_BUDGET, **settings)
        policy, predicted = plan.to_config(), plan.peak_bytes
    else:
        predicted = ac_core.estimate(model.build, policy=policy, **settings).peak_bytes
    with _ranks(case.strategy) as mesh:
        build = partial(_built, case, policy, model, number, mesh)
        real = peak_of_step(build, batch, partial(_loss, case), _OPTIMIZERS[case.optimizer])
    return Outcome(case, dtype, predicted, real)


_OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd+momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "none": None,
}


@contextmanager
def _ranks(strategy: str) -> Iterator[Any]:
    """What stands for the other ranks in the real step. A rank's memory is the same whether they answer or not."""
    if strategy == "fsdp2":
        with simulated_ranks(_RANKS) as mesh:
            yield mesh
    elif strategy == "ddp":  # its reducer wants real answers, and has the same buckets for one rank
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            yield None
        finally:
            dist.destroy_process_group()
    else:
        yield None


def _built(case: Case, policy: Any, model: Model, dtype: torch.dtype, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        built = model.build()
    finally:
        torch.set_default_dtype(default)
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)
    if case.loss == "fused":
        head = find_head(built)
        head.forward = partial(_head_loss, head, model.batch["labels"])
    ac_core.apply_activation_checkpointing(built, policy)
    if case.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in ac_core.find_blocks(built):
            fully_shard(block.module, mesh=mesh)
        fully_shard(built, mesh=mesh)
    if case.strategy == "ddp":
        built = nn.parallel.DistributedDataParallel(built)
    return built


def _head_loss(head: nn.Linear, labels: Tensor, hidden: Tensor) -> Tensor:
    from ac_loss import linear_cross_entropy

    return linear_cross_entropy(hidden, head.weight, labels, backend="torch")


def _loss(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if case.loss == "fused":
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return model(**batch).loss


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| model | policy | loss | optimizer | strategy | dtype | predicted MB | real MB | error |",
        "|--|--|--|--|--|--|--:|--:|--:|",
    ]
    for o in outcomes:
        c = o.case
        strategy = c.strategy if c.strategy == "none" else f"{c.strategy}, {_RANKS} ranks"
        lines.append(
            f"| {c.model} | {c.policy} | {c.loss} | {c.optimizer} | {strategy} | {o.dtype} | {o.predicted / 1e6:.2f} | "
            f"{o.real / 1e6:.2f} | {o.error:+.2%} |"
        )
    worst = max(outcomes, key=lambda o: abs(o.error))
    lines.append(f"\n{len(outcomes)} steps, largest error {worst.error:+.2%}.")
    return "\n".join(lines)
