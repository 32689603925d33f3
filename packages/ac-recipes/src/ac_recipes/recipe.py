"""What a recipe may say: one frozen dataclass a section. Loads without torch, so that a bad recipe is refused at once.

Field names are those of NeMo AutoModel recipes wherever the two mean the same thing. Settings of a component are the
component's own dataclass, the one it registers under the entry-point group `ac.config`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ac_core.strategies import FSDP2Config
from ac_loss.config import LossConfig
from ac_moe.config import MoEConfig
from ac_recipes.data.config import (
    DatasetConfig,
    PackedSequenceConfig,
    RecordsDatasetConfig,
    TextDatasetConfig,
    TokenizerConfig,
    check_together,
)
from ac_recipes.freeze_config import FreezeConfig
from ac_recipes.lora import PeftConfig
from ac_recipes.parallel.config import CompileConfig, check_compile, compile_config
from ac_recipes.parallel.layout import StrategyConfig, check_sizes
from ac_recipes.planned import check_planned
from ac_recipes.section import Section, at_least
from ac_recipes.trackers.config import TensorBoardConfig, WandbConfig
from ac_recipes.training.config import CheckpointConfig

_FLOAT32_MAX = 3.4e38


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model: a Hugging Face configuration with new weights, or a pretrained one.

    config: `model_type` and any field of that model's transformers configuration; `vocab_size` is the tokenizer's. A
        vision-language model has a `vision_config` and a `text_config` of its own in it.
        Beside a pretrained model, what that model is expected to be: `check` then needs no weights, and training
        refuses another.
    pretrained_model_name_or_path: a folder, a `.gguf` file, `package:NAME/FILE` for a file that an installed package
        carries, or the name of a model on the Hugging Face hub.
    dtype: of the parameters, of their gradients and of the computation.
    attn_implementation: as in transformers.
    backend: how the experts of a model run that `distributed.ep_size` shares out over ranks.
    """

    config: dict[str, Any] | None = None
    pretrained_model_name_or_path: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    backend: MoEConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config is None and not self.pretrained_model_name_or_path:
            raise ValueError("config: needs a config, or a pretrained_model_name_or_path")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config: needs a model_type, the transformers name of the architecture, such as llama")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW of torch.

    weight_decay applies to matrices; biases and norms, the parameters of one dimension, are not decayed.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= getattr(self, name) <= _FLOAT32_MAX:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not in [0, {_FLOAT32_MAX}]")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas!r} are not both in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(Section):
    """Learning rate: a linear warm-up from 0 to `optimizer.lr`, then a decay to `min_lr` at the last step.

    lr_warmup_steps: steps of the warm-up; `auto` is a tenth of all steps, at most 1000.
    """

    lr_decay_style: Literal["constant", "cosine", "linear"] = "cosine"
    lr_warmup_steps: int | Literal["auto"] = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lr_warmup_steps, str) and self.lr_warmup_steps != "auto":
            raise ValueError(f"lr_warmup_steps: {self.lr_warmup_steps!r} is neither 'auto' nor a number of steps")
        if self.lr_warmup_steps != "auto":
            at_least(0, self, "lr_warmup_steps")
        if self.min_lr < 0:
            raise ValueError(f"min_lr: {self.min_lr!r} is negative")


@dataclass(frozen=True, kw_only=True)
class StepSchedulerConfig(Section):
    """How many sequences make a step, and what happens how often.

    global_batch_size: sequences of one optimizer step over all ranks. local_batch_size: sequences of one forward on one
    rank; what is missing to the global batch is accumulated. `null` for the intervals means never; a checkpoint and a
    validation at the last step are made all the same.

    max_steps: optimizer steps. num_epochs: stop sooner, after so many passes over the training data.
    """

    global_batch_size: int = 8
    local_batch_size: int = 8
    max_steps: int = 100
    num_epochs: int | None = None
    val_every_steps: int | None = None
    ckpt_every_steps: int | None = None
    log_every_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("global_batch_size", "local_batch_size", "max_steps", "log_every_steps"):
            at_least(1, self, name)
        for name in ("val_every_steps", "ckpt_every_steps", "num_epochs"):
            if getattr(self, name) is not None:
                at_least(1, self, name)
        if self.global_batch_size % self.local_batch_size:
            raise ValueError(
                f"global_batch_size: {self.global_batch_size} is not a multiple of local_batch_size "
                f"{self.local_batch_size}"
            )


@dataclass(frozen=True, kw_only=True)
class ClipGradNormConfig(Section):
    """Gradients are scaled down to this total norm, taken over all parameters and ranks; `null`: never."""

    max_norm: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_norm is not None and self.max_norm <= 0:
            raise ValueError(f"max_norm: {self.max_norm!r} is not positive; null turns clipping off")


@dataclass(frozen=True, kw_only=True)
class RngConfig(Section):
    """Seed of the weights, of the data order and of dropout."""

    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: {self.seed} is not in [0, 2^32)")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Where runs are kept: each gets a folder of its own inside `dir`."""

    dir: str = "runs"


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """A whole training run."""

    model: ModelConfig
    distributed: StrategyConfig = field(default_factory=FSDP2Config)
    compile: bool | CompileConfig = False
    loss_fn: LossConfig = field(default_factory=LossConfig)
    peft: PeftConfig | None = None
    dataset: DatasetConfig = field(default_factory=TextDatasetConfig)
    validation_dataset: TextDatasetConfig | RecordsDatasetConfig | None = None
    packed_sequence: PackedSequenceConfig = field(default_factory=PackedSequenceConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    freeze_config: FreezeConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    step_scheduler: StepSchedulerConfig = field(default_factory=StepSchedulerConfig)
    clip_grad_norm: ClipGradNormConfig = field(default_factory=ClipGradNormConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rng: RngConfig = field(default_factory=RngConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scheduler.min_lr > self.optimizer.lr:
            raise ValueError(
                f"lr_scheduler.min_lr: {self.lr_scheduler.min_lr!r} is above optimizer.lr {self.optimizer.lr!r}"
            )
        for path, name in self.pretrained_names():
            if not name:
                raise ValueError(f"{path}: is empty")
        check_together(self.dataset, self.validation_dataset, self.packed_sequence)
        try:
            self.tokenizer.check_vocab_size(self.model.pretrained_model_name_or_path)
        except ValueError as error:
            raise ValueError(f"tokenizer.{error}") from error
        try:
            check_sizes(self.distributed)
        except ValueError as error:
            raise ValueError(f"distributed.{error}") from None
        if compile_config(self.compile) is not None:
            check_compile(self.distributed)
        check_planned(self)
        backend, distributed = self.model.backend, self.distributed
        if self.peft is not None and distributed.tp_size > 1:
            raise ValueError(
                f"peft: adapters cannot be split over distributed.tp_size {distributed.tp_size} ranks; leave tp_size "
                "at 1, and shard with strategy 'fsdp2'"
            )
        if self.peft is not None and self.freeze_config is not None:
            raise ValueError(
                "freeze_config: with peft all of the model's own weights are frozen, and adapters would train the "
                "parts named here; leave it out, and say in peft.target_modules which layers get adapters"
            )
        if backend is None:
            return
        if distributed.ep_size == 1:
            raise ValueError(
                "model.backend: says how experts run that are shared out over ranks, and distributed.ep_size is 1; set "
                "it to the number of ranks, or leave the section out"
            )
        cache = backend.dispatcher_recompute_cache
        if cache != "none" and distributed.checkpointing.policy == "none":
            raise ValueError(
                f"model.backend.dispatcher_recompute_cache: {cache!r} keeps outputs for a recompute, and "
                "distributed.activation_checkpointing is off; turn it on, or set the cache to 'none'"
            )

    @property
    def row_length(self) -> int:
        """Tokens of one row of a batch."""
        return self.packed_sequence.packed_sequence_size or self.dataset.sequence_length

    def pretrained_names(self) -> list[tuple[str, str]]:
        """Every pretrained model or tokenizer that is named, after the field that names it."""
        fields = {
            "model.pretrained_model_name_or_path": self.model.pretrained_model_name_or_path,
            "tokenizer.pretrained_model_name_or_path": self.tokenizer.pretrained_model_name_or_path,
        }
        return [(field, name) for field, name in fields.items() if name is not None]
