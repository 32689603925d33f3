"""`estimate`: what a training step will need, said before it runs."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ac_core.apply import apply_activation_checkpointing, remove_activation_checkpointing
from ac_core.config import ActivationCheckpointingConfig, PolicyName, Scope
from ac_core.discovery.blocks import Block, BlockChoice
from ac_core.estimation.assumptions import Setting
from ac_core.estimation.batches import text_batch
from ac_core.estimation.experts import keep_part_of_experts
from ac_core.estimation.kernels import Fused, fuse
from ac_core.estimation.losses import cross_entropy, own_loss, sum_of_logits, use_fused_loss
from ac_core.estimation.optimizers import optimizer_factory
from ac_core.estimation.result import Estimate, read_estimate
from ac_core.estimation.routing import Routing
from ac_core.estimation.simulate import Optimizer, Simulation, simulate
from ac_core.estimation.strategies import Ranks, ShareExperts, Strategy, check_strategy, ranks_of
from ac_core.proof.step import Loss
from ac_core.region.cache import cache_settings, turn_cache_on
from ac_core.region.contexts import ContextFn

Kernels = Literal["plain", "fused"]
Device = Literal["cuda", "cpu"]


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    batch: Any = None,
    dtype: torch.dtype | None = torch.bfloat16,
    compute_dtype: torch.dtype | None = None,
    optimizer: str | Optimizer | None = "adamw",
    policy: ActivationCheckpointingConfig | PolicyName | bool | None = "full",
    scope: Scope | list[str] | None = None,
    blocks: BlockChoice | Iterable[BlockChoice] | None = None,
    strategy: Strategy = "none",
    dp_size: int = 1,
    ep_size: int = 1,
    share_experts: ShareExperts | None = None,
    expert_load: float = 1.0,
    gradient_accumulation_steps: int = 1,
    loss: Literal["plain", "fused"] | Loss = "plain",
    kernels: Kernels = "plain",
    keep_output: bool = False,
    device: Device = "cuda",
) -> Estimate:
    """Predict the memory and the recompute of a training step, without a GPU and without weights.

    The step is run on tensors without values: the model's own forward, the policy applied by ac-core, autograd's
    backward, FSDP2 over ranks that are not there, the optimizer. What that leaves out, and what is assumed, stands in
    `assumptions` of the result.

    Args:
        model: a function that builds the model, such as `lambda: LlamaForCausalLM(config)`, which is called with fake
            tensors on; or a model, on any device including meta, which is copied without its weights and left alone.
        batch_size, sequence_length: of one rank's batch of tokens, for a language model.
        batch: what the model is called with, for any other: a mapping of keyword arguments, a tuple or a tensor, real,
            meta or fake. Integers and booleans that the model looks at have to be real.
        dtype: of the parameters, floating-point ones; `None`: as the model has them.
        compute_dtype: of matrix products where it is another: FSDP2's mixed precision, else autocast.
        optimizer: `"adamw"`, `"sgd"`, `"sgd+momentum"`, `"none"`, or a function from a list of parameters to one.
        policy, scope, blocks: as for `apply_activation_checkpointing`.
        strategy: `"none"`, `"ddp"` or `"fsdp2"`, where each block is a unit.
        dp_size: ranks; the estimate is of one of them.
        ep_size: of these ranks, how many share the experts of a mixture of experts.
        share_experts: shares them out, in place, over a mesh of the dimensions `"expert_copies"` and `"ep"`, as
            `ac_moe.parallelize` does, and returns the `context_fn` for checkpoints, or None. By default a rank keeps
            its share of the experts, and how rows travel is not simulated.
        expert_load: of the rows that an even routing would give to the experts of one rank, how many the rank that is
            looked at gets, from 1 to `ep_size`; for the busiest one. Needs `share_experts`.
        gradient_accumulation_steps: microbatches of an optimizer step. With more than one, the step that is looked at
            is a later microbatch, which finds gradients there and adds to them; its FLOPs are those of one.
        loss: `"plain"`: the model's own loss, or cross-entropy on its logits. `"fused"`: one that never has all logits,
            as ac-loss's. Or a function of the model's output.
        kernels: `"plain"`: every operation by itself, as PyTorch runs them. `"fused"`: norms and gated activations in
            one kernel each, which keeps its inputs alone.
        keep_output: the training loop holds the model's output, logits and all, until the backward is over, as one does
            that has it in a variable.
        device: whose kernels and optimizers are assumed.

    Raises:
        ValueError: a setting has no such value, or two contradict each other.
        TypeError: the model is none.
        ActivationCheckpointingError: the policy cannot be applied, the batch or the head is not known, the model looks
            at values that only a real run has.
    """
    config = _config(policy, scope)
    step = TrainingStep(
        model=model,
        batch_size=batch_size,
        sequence_length=sequence_length,
        batch=batch,
        dtype=dtype,
        compute_dtype=compute_dtype,
        optimizer=optimizer,
        blocks=blocks,
        strategy=strategy,
        dp_size=dp_size,
        ep_size=ep_size,
        share_experts=share_experts,
        expert_load=expert_load,
        gradient_accumulation_steps=gradient_accumulation_steps,
        loss=loss,
        kernels=kernels,
        keep_output=keep_output,
        device=device,
    )
    simulation = step.simulate(partial(apply_activation_checkpointing, config=config, blocks=blocks))
    return read_estimate(simulation, step.setting(config))


def _config(
    policy: ActivationCheckpointingConfig | PolicyName | bool | None, scope: Scope | list[str] | None
) -> ActivationCheckpointingConfig:
    if not isinstance(policy, ActivationCheckpointingConfig):
        return ActivationCheckpointingConfig(policy=policy, scope="all" if scope is None else scope)
    if scope is not None:
        raise ValueError(f"scope: {scope!r} is given beside a config; put it in the config")
    return policy


class Apply(Protocol):
    """Gives a model its checkpointing, with the `context_fn` that its experts need."""

    def __call__(self, model: nn.Module, *, context_fn: ContextFn | None = None) -> object: ...


_LOCK = RLock()


@contextmanager
def _alone() -> Iterator[None]:
    """One simulation at a time: it sets torch's default dtype and replaces functions, which all threads share. Autograd
    is on in it whatever the caller has off, and Python's random numbers go on as if it had not been."""
    with _LOCK, torch.inference_mode(False), torch.enable_grad():
        state = random.getstate()
        try:
            yield
        finally:
            random.setstate(state)


@dataclass(kw_only=True)
class TrainingStep:
    """A training step to be simulated, but for the policy: what `estimate` takes, under the same names.

    fused: what was taken for fused kernels. labels: for the loss, where the model takes none.

    Raises:
        ValueError: a setting has no such value, or two contradict each other.
    """

    model: nn.Module | Callable[[], nn.Module]
    batch_size: int | None = None
    sequence_length: int | None = None
    batch: Any = None
    dtype: torch.dtype | None = torch.bfloat16
    compute_dtype: torch.dtype | None = None
    optimizer: str | Optimizer | None = "adamw"
    blocks: BlockChoice | Iterable[BlockChoice] | None = None
    strategy: Strategy = "none"
    dp_size: int = 1
    ep_size: int = 1
    share_experts: ShareExperts | None = None
    expert_load: float = 1.0
    gradient_accumulation_steps: int = 1
    loss: Literal["plain", "fused"] | Loss = "plain"
    kernels: Kernels = "plain"
    keep_output: bool = False
    device: Device = "cuda"
    fused: Fused | None = field(default=None, init=False)
    labels: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._check()
        check_strategy(self.strategy, self.dp_size, self.ep_size)
        if self.share_experts is not None and self.ep_size == 1:
            raise ValueError("share_experts: is given, and ep_size is 1, so there is nobody to share with")
        self._routing = Routing(self.ep_size, self.expert_load)
        if self.share_experts is None and self.expert_load != 1:
            raise ValueError(f"expert_load: {self.expert_load} needs share_experts=, which says how rows travel")
        self._build_optimizer = optimizer_factory(self.optimizer, self.device)

    def _check(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("sequence_length", self.sequence_length)):
            if self.batch is not None and value is not None:
                raise ValueError(f"{name}: {value} is given beside a batch, whose own shape counts; leave one out")
            if self.batch is None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}: {value!r} is not a whole number, at least 1; give it, or a batch")
        count = self.gradient_accumulation_steps
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"gradient_accumulation_steps: {count!r} is no whole number of microbatches, at least 1")
        for name, value, valid in (("kernels", self.kernels, Kernels), ("device", self.device, Device)):
            if value not in get_args(valid):
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, get_args(valid)))}")
        if not callable(self.loss) and self.loss not in ("plain", "fused"):
            raise ValueError(f"loss: {self.loss!r} is not one of 'plain', 'fused', and no function of the output")

    def setting(self, config: ActivationCheckpointingConfig) -> Setting:
        """The step in words, with what a config says of its checkpointing."""
        ids = self.batch.get("input_ids") if isinstance(self.batch, Mapping) else None
        optimizer = "none" if self.optimizer is None else "the caller's"
        return Setting(
            policy=str(config.policy),
            offload=config.offload,
            strategy=self.strategy,
            dp_size=self.dp_size,
            ep_size=self.ep_size,
            expert_load=None if self.share_experts is None else self.expert_load,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            rows=ids.shape[0] if isinstance(ids, Tensor) else self.batch_size,
            loss=self.loss if isinstance(self.loss, str) else "a function of the caller's",
            kernels=self.kernels,
            keep_output=self.keep_output,
            fused=self.fused,
            device=self.device,
            dtype=self.dtype,
            compute_dtype=self.compute_dtype,
            optimizer=self.optimizer if isinstance(self.optimizer, str) else optimizer,
        )

    def simulate(self, apply: Apply) -> Simulation:
        """The step, of a model to which `apply` has given its checkpointing."""
        before: list[tuple[Any, Any]] = []
        try:
            with _alone(), ranks_of(self.strategy, self.dp_size, self.ep_size, self.compute_dtype) as ranks:

                def prepare(made: nn.Module) -> None:
                    before.extend(cache_settings(made))
                    self._prepare(made, apply, ranks)

                return simulate(
                    self.model,
                    self.make_batch,
                    prepare=prepare,
                    shard=ranks.shard,
                    loss=self.differentiated,
                    optimizer=self._build_optimizer,
                    dtype=self.dtype,
                    autocast=None if self.strategy == "fsdp2" else self.compute_dtype,
                    keep_output=self.keep_output,
                    accumulates=self.gradient_accumulation_steps > 1,
                    blocks=self.blocks,
                    routing=self._routing,
                )
        finally:
            turn_cache_on(before)  # a factory gives its caller's own config to the model

    def make_batch(self, model: nn.Module, blocks: list[Block]) -> Any:
        batch = self.batch
        if batch is None:
            batch = text_batch(model, blocks, self.batch_size or 0, self.sequence_length or 0)
            self.labels = None if "labels" in batch else batch["input_ids"]
        if self.loss == "fused" and isinstance(batch, Mapping):
            # With labels the model would compute a loss of its own, from logits that are not there.
            batch = {name: value for name, value in batch.items() if name != "labels"}
        return batch

    def _prepare(self, model: nn.Module, apply: Apply, ranks: Ranks) -> None:
        remove_activation_checkpointing(model)  # from the copy of a model that is checkpointed already
        context_fn = None
        if self.share_experts is not None:
            assert ranks.grid is not None
            context_fn = self.share_experts(model, ranks.grid)
        elif self.ep_size > 1:
            keep_part_of_experts(model, self.ep_size)
        if self.kernels == "fused":
            self.fused = fuse(model)
        if self.loss == "fused":
            use_fused_loss(model, self.device)
        apply(model, context_fn=context_fn)

    @property
    def differentiated(self) -> Loss | None:
        """From the output of the model to the loss; None: what `measure` makes of the output of any model."""
        if callable(self.loss):
            return self.loss
        if self.loss == "fused":
            return sum_of_logits
        return self._of_text if self.batch is None else None

    def _of_text(self, output: Any) -> Tensor:
        return own_loss(output) if self.labels is None else cross_entropy(self.labels, output)
