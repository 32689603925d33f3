"""What each section of an AutoModel recipe means here; `data_table` has those of the data.

Written against AutoModel of mid-2026 and its 388 recipes for language and vision-language models. A section lists the
keys whose meaning differs, and the `_target_` names it knows; all other keys keep their names.
"""

import re

from ac_recipes.automodel.data_table import COLLATERS, DATA_SECTIONS
from ac_recipes.automodel.rules import (
    Translation,
    harmless,
    is_text,
    one_of,
    only,
    refused,
    same,
    scope,
    to,
    unless_null,
)
from ac_recipes.automodel.section import Section, Target, named
from ac_recipes.config_source import architectures
from ac_recipes.reader.mistakes import KeyPath
from ac_recipes.reader.nodes import Entry, ListNode, ScalarNode, node_of

_COMPONENTS = "nemo_automodel.components"
_SPEED = harmless("changes the speed alone")
_KERNEL = harmless("another kernel of the same function; torch's is used")
_FP8 = "training in fp8; leave it out, and it trains in model.dtype"
_QUANTIZED = "quantized weights; leave it out, and the weights have model.dtype"
_QAT = "training for quantized weights; leave it out"
_LAUNCHING = harmless("how it is launched is said on the command line")


_RECIPES = frozenset(
    f"{module}{name}"
    for module, name in (
        ("", "TrainFinetuneRecipeForNextTokenPrediction"),
        ("nemo_automodel.recipes.llm.train_ft.", "TrainFinetuneRecipeForNextTokenPrediction"),
        ("", "FinetuneRecipeForVLM"),
        ("nemo_automodel.recipes.vlm.finetune.", "FinetuneRecipeForVLM"),
    )
)

RECIPE = Section(
    rules={
        "ci": harmless("AutoModel's own tests"),
        "dist_env": harmless("ranks use nccl on GPUs and gloo on CPUs, with torch's timeout"),
        "nvtx": only("false", because="marks for the profiler; use a profiler on the command line"),
        "recipe": one_of(_RECIPES, "is what train does", because="recipes other than fine-tuning and pretraining"),
        "seed": to("rng", "seed"),
        "slurm": _LAUNCHING,
        "skypilot": _LAUNCHING,
        "validation_dataset": unless_null(refused("a validation set that is not a mapping")),
        "validation_dataloader": harmless("validation goes through the held-out records in order"),
        "benchmark": refused("ac-recipes compare measures"),
        "processor": refused("processors of images and audio"),
        "quantization": unless_null(refused(_QUANTIZED)),
        "fp8": unless_null(refused(_FP8)),
        "qat": unless_null(refused(_QAT)),
    },
)
"""The top level."""

_LM = "nemo_automodel.NeMoAutoModelForCausalLM"
_VLM = "nemo_automodel.NeMoAutoModelForImageTextToText"

_BACKEND = Section(
    rules={
        "attn": _KERNEL,
        "linear": _KERNEL,
        "rms_norm": _KERNEL,
        "rope": _KERNEL,
        "rope_fusion": _KERNEL,
        "enable_hf_state_dict_adapter": harmless("checkpoints have one format"),
        "enable_fsdp_optimizations": _SPEED,
        "enable_deepep": only("false", because="name the dispatcher: hybridep or alltoall"),
        "fake_balanced_gate": only("false", because="a gate that is not the model's"),
        "fake_gate_noise": only("0", because="a gate that is not the model's"),
        "gate_precision": only("null", because="the gate computes in the model's own dtype"),
        "te_fp8": only("null", because="training in fp8"),
        "compile_attn": only("false", because="blocks are compiled whole, by the section compile"),
        "dispatcher": to("dispatcher", words={"torch": "alltoall"}),
    },
    targets=named(
        f"{_COMPONENTS}.models.common.BackendConfig",
        f"{_COMPONENTS}.models.common.utils.BackendConfig",
        f"{_COMPONENTS}.moe.utils.BackendConfig",
        target=Target(),
    ),
)

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "auto"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "float32"),
}

_MODEL = Section(
    rules={
        "torch_dtype": to("dtype", words=_DTYPES),
        "trust_remote_code": harmless("code of a model's repository is never run"),
        "force_hf": only("true", "false", because="anything but true or false"),
        "use_liger_kernel": _KERNEL,
        "use_sdpa_patching": _KERNEL,
        "output_hidden_states": harmless("the fused loss takes the hidden states itself"),
        "name_or_path": to("pretrained_model_name_or_path"),
        "quantization_config": unless_null(refused(_QUANTIZED)),
        "fp8_config": unless_null(refused(_FP8)),
        "base_activation_checkpointing": refused("checkpointing of a part by its own key; name it in the scope"),
    },
    targets={
        f"{_LM}.from_pretrained": Target(),
        f"{_LM}.from_config": Target(),
        "nemo_automodel._transformers.auto_model.NeMoAutoModelForCausalLM.from_pretrained": Target(),
        "nemo_automodel._transformers.auto_model.NeMoAutoModelForCausalLM.from_config": Target(),
        f"{_VLM}.from_pretrained": Target(),
        f"{_VLM}.from_config": Target(),
    },
)

_TEXT_CONFIG = Section(
    rules={
        "use_cache": harmless("training keeps no key/value cache"),
        "output_hidden_states": harmless("the fused loss takes the hidden states itself"),
    }
)


def _architecture(name: str) -> Target | None:
    """`transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig`, by transformers' own list of classes."""
    found = re.fullmatch(r"transformers\.(?:models\.[\w.]+\.)?(\w+Config)", name)
    types = [model_type for model_type, kind in architectures().items() if found and kind == found[1]]
    return Target(fields={"model_type": types[0]}) if types else None


_CONFIG = Section(
    targets={
        "transformers.AutoConfig.from_pretrained": Target(
            refused="new weights with the configuration of a model on the hub; write out its fields, model_type first"
        )
    },
    pattern=_architecture,
)

_DISTRIBUTED = Section(
    rules={
        "activation_checkpointing_scope": scope,
        **dict.fromkeys(("dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size"), unless_null(same)),
        "sequence_parallel": only("false", because="sequence parallelism"),
        "use_hf_tp_plan": only("true", because="plans other than transformers' own"),
        "tp_plan": only("null", because="plans other than transformers' own"),
        "mp_policy": refused("mixed precision other than model.dtype"),
        "autocast_dtype": only("null", because="mixed precision other than model.dtype"),
        "offload_policy": only("null", because="offloading"),
        "cpu_offload": only("false", because="offloading"),
        "pipeline": refused("pipeline parallelism"),
        "defer_fsdp_grad_sync": _SPEED,
        "enable_fsdp2_prefetch": _SPEED,
        "fsdp2_backward_prefetch_depth": _SPEED,
        "fsdp2_forward_prefetch_depth": _SPEED,
        "patch_is_packed_sequence": _SPEED,
        "enable_async_tensor_parallel": only("false", because="asynchronous tensor parallelism"),
        "enable_compile": only("false", because="write the section compile"),
    },
    targets={
        **named(
            f"{_COMPONENTS}.distributed.fsdp2.FSDP2Manager",
            f"{_COMPONENTS}.distributed.config.FSDP2Config",
            target=Target({"strategy": "fsdp2"}),
        ),
        **named(
            f"{_COMPONENTS}.distributed.ddp.DDPManager",
            f"{_COMPONENTS}.distributed.config.DDPConfig",
            target=Target({"strategy": "ddp"}),
        ),
        **named(
            f"{_COMPONENTS}.distributed.megatron_fsdp.MegatronFSDPManager",
            f"{_COMPONENTS}.distributed.config.MegatronFSDPConfig",
            target=Target({"strategy": "megatron_fsdp"}),
        ),
    },
)

_MOE = Section(
    rules={
        "reshard_after_forward": _SPEED,
        "wrap_outer_model": _SPEED,
        "ignore_router_for_ac": refused("keeping the router's outputs by itself; policy selective keeps them"),
    }
)

_SUM = only("sum", because="the loss is the mean over the label tokens of the global batch")

_LOSS = Section(
    targets={
        f"{_COMPONENTS}.loss.linear_ce.FusedLinearCrossEntropy": Target({"kind": "fused"}, {"reduction": _SUM}),
        f"{_COMPONENTS}.loss.masked_ce.MaskedCrossEntropy": Target(
            {"kind": "plain"},
            {"reduction": _SUM, "fp32_upcast": only("true", because="the loss is computed in fp32")},
        ),
        f"{_COMPONENTS}.loss.chunked_ce.ChunkedCrossEntropy": Target(
            {"kind": "fused"},
            {"reduction": _SUM, "chunk_len": harmless("the fused loss chooses its chunks")},
        ),
        f"{_COMPONENTS}.loss.te_parallel_ce.TEParallelCrossEntropy": Target(refused="a loss over a sharded vocabulary"),
    }
)

_OPTIMIZER_RULES = {"fused": _SPEED, "foreach": _SPEED, "amsgrad": only("false", because="amsgrad")}
_TORCH_DEFAULTS = {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}

_OPTIMIZER = Section(
    rules=_OPTIMIZER_RULES,
    targets={
        "torch.optim.AdamW": Target({**_TORCH_DEFAULTS, "weight_decay": 0.01}),
        "torch.optim.Adam": Target(
            {**_TORCH_DEFAULTS, "weight_decay": 0.0},
            {"weight_decay": only("0", because="Adam adds the decay to the gradient; take torch.optim.AdamW")},
        ),
    },
)

_SCHEDULE = Section(rules={"init_lr": only("0", because="a warm-up that begins above 0")})

_STEPS = Section(
    rules={
        "gc_every_steps": _SPEED,
        "log_remote_every_steps": harmless("every step is logged"),
        "loss_average_window_steps": harmless("the loss of every step is logged"),
        "save_checkpoint_every_epoch": only("false", because="checkpoints after each epoch; set ckpt_every_steps"),
    }
)

_RNG = Section(
    rules={"ranked": harmless("what ranks draw differs always")},
    targets={f"{_COMPONENTS}.training.rng.StatefulRNG": Target()},
)


def _consolidated(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """Weights as one Hugging Face folder: asked for only where checkpoints are written at all."""
    if is_text(entry.node, "false") or is_text(translation.get("checkpoint", "enabled"), "false"):
        translation.leave_out(path, entry, "is so here")
    else:
        translation.refuse(path, entry, "weights as one Hugging Face folder; the README tells the command for one file")


_CHECKPOINT = Section(
    rules={
        "checkpoint_dir": to("run", "dir"),
        "model_save_format": harmless("checkpoints are torch.distributed.checkpoint's"),
        "save_consolidated": _consolidated,
        "dequantize_base_checkpoint": only("false", because="quantized weights"),
        "restore_from": unless_null(refused("starting from a checkpoint; ac-recipes train --resume RUN")),
        "is_async": _SPEED,
    }
)

_COMPILE = Section(switch="enabled", rules={"backend": unless_null(same), "mode": unless_null(same)})

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _modules(translation: Translation, path: KeyPath, entry: Entry) -> None:
    """AutoModel's globs over module names as the ends of names: `*.q_proj`; `*_proj` is every projection of a block."""
    node = entry.node
    written = [node] if isinstance(node, ScalarNode) else node.items if isinstance(node, ListNode) else ()
    texts = [item.text for item in written if isinstance(item, ScalarNode)]
    names = [name for text in texts for name in (_PROJECTIONS if text == "*_proj" else (_module(text),))]
    if len(texts) < len(written) or "all-linear" in names:
        translation.put(path, entry)
    elif any("*" in name for name in names):
        translation.refuse(path, entry, "globs other than *.NAME and *_proj")
    else:
        translation.put(path, Entry(entry.key_place, node_of(names, node.place)))


def _module(glob: str) -> str:
    name = glob.removeprefix("*.")
    return name[1:] if name[:1] == "*" and name[1:] in _PROJECTIONS else name


_PEFT = Section(
    rules={
        "target_modules": _modules,
        "match_all_linear": harmless("all linear layers, unless target_modules names some"),
        "use_triton": _KERNEL,
        "use_dora": only("false", because="DoRA; leave it out, and the adapters are LoRA's"),
        "exclude_modules": unless_null(refused("exclusions; name the modules in target_modules")),
    },
    targets={f"{_COMPONENTS}._peft.lora.PeftConfig": Target()},
)

_WANDB = Section(switch="enable", rules={"enable": only("true", because="anything but true or false")})

SECTIONS: dict[str, Section] = {
    "model": _MODEL,
    "model.backend": _BACKEND,
    "model.config": _CONFIG,
    "model.text_config": _TEXT_CONFIG,
    "distributed": _DISTRIBUTED,
    "distributed.moe": _MOE,
    "loss_fn": _LOSS,
    "optimizer": _OPTIMIZER,
    "lr_scheduler": _SCHEDULE,
    "step_scheduler": _STEPS,
    "rng": _RNG,
    "checkpoint": _CHECKPOINT,
    "compile": _COMPILE,
    "peft": _PEFT,
    "wandb": _WANDB,
    "quantization": Section(refused=_QUANTIZED),
    "fp8": Section(switch="enabled", refused=_FP8),
    "qat": Section(switch="enabled", refused=_QAT),
    "neftune": Section(switch="enabled", refused="noise in the embeddings; leave it out"),
    **DATA_SECTIONS,
}
"""Every section that differs from ours, by its dotted place."""

KNOWN = frozenset(
    {"transformers.AutoProcessor.from_pretrained"}
    | COLLATERS
    | _RECIPES
    | {name for section in (RECIPE, *SECTIONS.values()) for name in section.targets}
)
"""Every `_target_` that some section knows."""
