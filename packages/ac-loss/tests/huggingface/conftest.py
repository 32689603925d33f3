"""Tiny random transformers models, one training step, and an instrument that sees logits."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ac_loss.backends.torch_backend import chunking

transformers = pytest.importorskip("transformers", minversion="5.17")

VOCAB = 151  # of no other dimension
ROWS, LENGTH = 3, 24

_SIZES = {
    32: "hidden_size n_embd d_model emb_dim embed_dim word_embed_proj_dim embedding_size",
    48: "intermediate_size ffn_dim n_inner d_ff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size",
    16: "moe_intermediate_size shared_expert_intermediate_size",
    8: "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank kv_lora_rank rotary_dim time_step_rank "
    "sliding_window state_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts",
    2: "num_key_value_heads num_experts_per_tok num_hidden_layers n_layer n_layers num_layers decoder_layers "
    "encoder_layers num_decoder_layers num_encoder_layers eos_token_id",
    1: "n_group topk_group first_k_dense_replace bos_token_id n_shared_experts",
    0: "pad_token_id",
    64: "max_position_embeddings n_positions",
    VOCAB: "vocab_size n_words src_vocab_size tgt_vocab_size",
}
_BY_NAME = {name: size for size, names in _SIZES.items() for name in names.split()}


def _sizes(config_class: type) -> dict[str, Any]:
    """Small values for the fields that it has and does not leave empty by itself."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    small = {name: size for name, size in _BY_NAME.items() if defaults.get(name) not in (None, dataclasses.MISSING)}
    dropouts = {name: 0.0 for name, value in defaults.items() if "drop" in name and isinstance(value, float)}
    return small | dropouts


def _build(class_name: str, **overrides: Any) -> torch.nn.Module:
    """A model in training mode, fp32, with the same random weights every time. A dict is a sub-configuration."""
    model_class = getattr(transformers, class_name)
    settings = _sizes(model_class.config_class) | overrides
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).float().train()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter.shape[0] == VOCAB:  # logits wide enough for a softcap and a tanh to show
            torch.nn.init.normal_(parameter, std=0.5)
        elif "bias" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _text(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(9, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :5] = labels[2, -3:] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(9, VOCAB, (ROWS, LENGTH), generator=generator)
    return inputs


class SeesLogits(TorchDispatchMode):
    """Remembers the shape of every tensor whose storage could hold the logits of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and VOCAB in tensor.shape:
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements >= VOCAB * ROWS * (LENGTH - 1):
                    self.found.append(list(tensor.shape))
        return out


@dataclasses.dataclass
class Step:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    output: Any
    logits_seen: list[list[int]]

    def assert_equal(self, other: "Step", loss: float = 1e-6, gradients: float = 1e-5) -> None:
        """`loss`: relative; `gradients`: norm of the difference over the norm, of each parameter.

        Where a gradient is rounding noise (a key's bias under softmax), it is the norm over all that counts.
        """
        assert abs(self.loss - other.loss) <= loss * abs(other.loss)
        assert self.gradients.keys() == other.gradients.keys()
        whole = torch.stack([gradient.norm() for gradient in other.gradients.values()]).norm()
        for name, gradient in other.gradients.items():
            away = (self.gradients[name] - gradient).norm()
            assert away <= gradients * max(gradient.norm(), 0.1 * whole), (name, away / gradient.norm())


def _step(model: torch.nn.Module, inputs: dict[str, Any]) -> Step:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with SeesLogits() as seen:
        output = model(**inputs)
        output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(output.loss.detach(), copy.copy(gradients), output, seen.found)


@pytest.fixture(scope="session")
def build() -> Callable[..., torch.nn.Module]:
    return _build


@pytest.fixture(scope="session")
def text() -> Callable[[torch.nn.Module], dict[str, torch.Tensor]]:
    return _text


@pytest.fixture(scope="session")
def step() -> Callable[[torch.nn.Module, dict[str, Any]], Step]:
    return _step


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens, so that the tiny batches have several."""
    for name in ("ROWS_WIDE", "ROWS_NARROW", "ROWS_FLOOR"):
        monkeypatch.setattr(chunking, name, 16)
