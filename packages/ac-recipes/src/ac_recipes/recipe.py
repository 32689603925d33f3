"""What a recipe may say: one frozen dataclass a section. Loads without torch, so that a bad recipe is refused at once.

Field names are those of NeMo AutoModel recipes wherever the two mean the same thing. Settings of a component are the
component's own dataclass, the one it registers under the entry-point group `ac.config`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ac_core.strategies import FSDP2Config
from ac_loss.config import LossConfig
from ac_moe.config import MoEConfig
from ac_recipes.parallel.config import CompileConfig, check_compile, compile_config
from ac_recipes.parallel.layout import StrategyConfig, check_sizes

_FLOAT32_MAX = 3.4e38


class _Section:
    """Refuses a value that is not one of a field's choices, when a section is made from Python as well."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), get_args(kind)
            if get_origin(kind) is Literal and value not in choices:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, choices))}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Section):
    """The model, built from a Hugging Face configuration with new weights.

    config: `model_type` and any field of that model's transformers configuration; `vocab_size` is the tokenizer's.
    dtype: of the parameters, of their gradients and of the computation.
    attn_implementation: as in transformers.
    backend: how the experts of a model run that `distributed.ep_size` shares out over ranks.
    """

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    backend: MoEConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.config.get("model_type"), str):
            raise ValueError("config: needs a model_type, the transformers name of the architecture, such as llama")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(_Section):
    """Plain text, cut into sequences.

    text: `pydoc_topics`, the English text on the Python language that every Python carries, or a list of UTF-8 files
        (relative to the working directory). Each topic or file is one document.
    sequence_length: tokens of one training sequence.
    validation_fraction: share of the documents' text, in sequences, that is held out and never trained on.
    """

    text: Literal["pydoc_topics"] | tuple[str, ...] = "pydoc_topics"
    sequence_length: int = 256
    validation_fraction: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, self, "sequence_length")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction: {self.validation_fraction!r} is not in [0, 1)")
        if isinstance(self.text, str) and self.text != "pydoc_topics":
            raise ValueError(f"text: {self.text!r} is neither 'pydoc_topics' nor a list of files")
        if not self.text:
            raise ValueError("text: the list of files is empty")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(_Section):
    """A byte-level BPE tokenizer, trained on the training text when the run starts and kept in its folder."""

    vocab_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 257 <= self.vocab_size <= 10_000_000:
            raise ValueError(
                f"vocab_size: {self.vocab_size} is not between 257 (256 bytes and the end-of-text token) and 10 million"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Section):
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
class LRSchedulerConfig(_Section):
    """Learning rate: a linear warm-up from 0 to `optimizer.lr`, then a decay to `min_lr` at the last step."""

    lr_decay_style: Literal["constant", "cosine", "linear"] = "cosine"
    lr_warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, self, "lr_warmup_steps")
        if self.min_lr < 0:
            raise ValueError(f"min_lr: {self.min_lr!r} is negative")


@dataclass(frozen=True, kw_only=True)
class StepSchedulerConfig(_Section):
    """How many sequences make a step, and what happens how often.

    global_batch_size: sequences of one optimizer step over all ranks. local_batch_size: sequences of one forward on one
    rank; what is missing to the global batch is accumulated. `null` for the intervals means never; a checkpoint and a
    validation at the last step are made all the same.
    """

    global_batch_size: int = 8
    local_batch_size: int = 8
    max_steps: int = 100
    val_every_steps: int | None = None
    ckpt_every_steps: int | None = None
    log_every_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("global_batch_size", "local_batch_size", "max_steps", "log_every_steps"):
            _at_least(1, self, name)
        for name in ("val_every_steps", "ckpt_every_steps"):
            if getattr(self, name) is not None:
                _at_least(1, self, name)
        if self.global_batch_size % self.local_batch_size:
            raise ValueError(
                f"global_batch_size: {self.global_batch_size} is not a multiple of local_batch_size "
                f"{self.local_batch_size}"
            )


@dataclass(frozen=True, kw_only=True)
class ClipGradNormConfig(_Section):
    """Gradients are scaled down to this total norm, taken over all parameters and ranks; `null`: never."""

    max_norm: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_norm is not None and self.max_norm <= 0:
            raise ValueError(f"max_norm: {self.max_norm!r} is not positive; null turns clipping off")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Section):
    """Checkpoints of torch.distributed.checkpoint in the run folder."""

    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class RngConfig(_Section):
    """Seed of the weights, of the data order and of dropout."""

    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: {self.seed} is not in [0, 2^32)")


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Section):
    """Where runs are kept: each gets a folder of its own inside `dir`."""

    dir: str = "runs"


@dataclass(frozen=True, kw_only=True)
class Recipe(_Section):
    """A whole training run."""

    model: ModelConfig
    distributed: StrategyConfig = field(default_factory=FSDP2Config)
    compile: bool | CompileConfig = False
    loss_fn: LossConfig = field(default_factory=LossConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    step_scheduler: StepSchedulerConfig = field(default_factory=StepSchedulerConfig)
    clip_grad_norm: ClipGradNormConfig = field(default_factory=ClipGradNormConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rng: RngConfig = field(default_factory=RngConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scheduler.min_lr > self.optimizer.lr:
            raise ValueError(
                f"lr_scheduler.min_lr: {self.lr_scheduler.min_lr!r} is above optimizer.lr {self.optimizer.lr!r}"
            )
        try:
            check_sizes(self.distributed)
        except ValueError as error:
            raise ValueError(f"distributed.{error}") from None
        if compile_config(self.compile) is not None:
            check_compile(self.distributed)
        backend, distributed = self.model.backend, self.distributed
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


TARGETS: dict[str, dict[str, object]] = {
    "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy": {"kind": "fused"},
    "torch.optim.AdamW": {"name": "adamw"},
}
"""What a `_target_` of an AutoModel recipe means here. Nothing is imported under such a name."""


def _at_least(least: int, config: object, name: str) -> None:
    if (value := getattr(config, name)) < least:
        raise ValueError(f"{name}: {value!r} is below {least}")
