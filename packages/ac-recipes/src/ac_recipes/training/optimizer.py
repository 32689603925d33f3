"""The optimizer, and the learning rate as a function of the step."""

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW, Optimizer

from ac_recipes.recipe import LRSchedulerConfig, OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """AdamW over the trainable parameters; those of one dimension (norms, biases) are not decayed."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(step: int, max_steps: int, peak: float, config: LRSchedulerConfig) -> float:
    """The rate of optimizer step `step` (from 0): linear from 0 to `peak` over the warm-up, then the decay.

    A function of the step and not a scheduler with a state: a resumed run has the right rate without restoring it.
    """
    warmup = warmup_steps(max_steps, config)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_decay_style == "constant":
        return peak
    progress = (step - warmup) / max(1, max_steps - 1 - warmup)
    left = 1 - progress if config.lr_decay_style == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (peak - config.min_lr) * left


def warmup_steps(max_steps: int, config: LRSchedulerConfig) -> int:
    """How many of `max_steps` the warm-up takes."""
    return min(1000, max_steps // 10) if config.lr_warmup_steps == "auto" else config.lr_warmup_steps


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
