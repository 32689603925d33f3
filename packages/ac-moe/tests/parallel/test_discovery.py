"""Experts are found by how they are written, and what does not fit is named with its reason."""

from collections.abc import Callable

import ac_moe_hf as hf
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ac_moe.parallel.discovery import alike, check_experts, find_experts


@pytest.mark.parametrize(
    ("family", "block", "router", "weighted_after"),
    [
        ("Mixtral", "mlp", "gate", False),
        ("Qwen3Moe", "mlp", "gate", False),
        ("Olmoe", "mlp", "gate", False),
        ("DeepseekV3", "mlp", "gate", False),
        ("GptOss", "mlp", "router", True),
    ],
)
def test_families_of_transformers(family: str, block: str, router: str, weighted_after: bool) -> None:
    pytest.importorskip("transformers")
    layers = find_experts(hf.build(family))
    check_experts(layers)
    assert [layer.name for layer in layers] == [f"model.layers.{i}.{block}.experts" for i in range(hf.LAYERS)]
    assert [layer.router_name for layer in layers] == [f"model.layers.{i}.{block}.{router}" for i in range(hf.LAYERS)]
    for layer in layers:
        assert layer.num_experts == hf.EXPERTS
        assert layer.weighted_after is weighted_after
        assert set(layer.parameter_names) == dict(layer.module.named_parameters()).keys()


def test_experts_with_their_own_code() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        intermediate_size_mlp=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        interleave_moe_layer_step=1,
        pad_token_id=0,
    )
    model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(ValueError, match=r"2 x model\.layers\.\*\.feed_forward\.experts, Llama4TextExperts: its comp"):
        check_experts(find_experts(model))


class _Wrapper(nn.Module):
    """As PEFT wraps experts for LoRA."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _quantised(block: hf.Block) -> None:
    down = block.experts.down_proj
    block.experts.down_proj = nn.Parameter(down.detach().to(torch.float8_e4m3fn), requires_grad=False)


def _lora(block: hf.Block) -> None:
    block.experts = _Wrapper(block.experts)


def _parametrized(block: hf.Block) -> None:
    parametrize.register_parametrization(block.experts, "down_proj", _Doubled())


def _replaced(block: hf.Block) -> None:
    block.experts.forward = lambda *_: None


def _sharded_by_transformers(block: hf.Block) -> None:
    block.experts._is_expert_parallel = True


def _norm(block: hf.Block) -> None:
    block.experts.has_post_expert_norm = True
    block.experts.post_expert_norm = nn.LayerNorm(hf.HIDDEN)


def _without_bias(block: hf.Block) -> None:
    block.experts.has_bias = True


def _transposed(block: hf.Block) -> None:
    block.experts.is_transposed = True


class _ThreeRouted(hf.Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights, mask):
        return super().forward(hidden_states, top_k_index, top_k_weights * mask)


def _another_argument(block: hf.Block) -> None:
    block.experts = _ThreeRouted()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_quantised, r"Experts: down_proj is quantised \(Parameter of torch\.float8_e4m3fn\)"),
        (_lora, r"layers\.\*\.experts, _Wrapper: has LoRA adapters"),
        (_parametrized, r"its parameters are parametrized"),
        (_replaced, r"its forward is replaced on the instance"),
        (_sharded_by_transformers, r"transformers has sharded it already"),
        (_norm, r"post_expert_norm\.weight \[16\] is not a parameter per expert"),
        (_without_bias, r"has no parameter gate_up_proj_bias, down_proj_bias \(gate_up_proj \[4, 16, 16\]"),
        (_transposed, r"shapes do not fit one another \(gate_up_proj \[4, 16, 16\], down_proj \[4, 16, 8\], is_tr"),
        (_another_argument, r"forward takes \(hidden_states, top_k_index, top_k_weights, mask\)"),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[hf.Block], None], said: str) -> None:
    model = hf.StandIn()
    for layer in model.layers:
        change(layer)
    with pytest.raises(ValueError, match=said) as caught:
        check_experts(find_experts(model))
    assert f"{hf.LAYERS} x layers.*.experts" in str(caught.value)


def test_one_misfit_among_others_is_enough() -> None:
    model = hf.StandIn()
    _transposed(model.layers[1])
    with pytest.raises(ValueError, match=r"1 x layers\.\*\.experts"):
        check_experts(find_experts(model))


def test_router_that_is_none_is_not_taken_for_one() -> None:
    model = hf.StandIn()
    for layer in model.layers:
        layer.gate_of_output, layer.scorer, layer.gate = nn.Linear(hf.HIDDEN, 1), layer.gate, nn.Identity()
    layers = find_experts(model)
    check_experts(layers)
    assert [layer.router for layer in layers] == [None, None]


def test_alike() -> None:
    assert alike("model.layers.12.mlp3.experts") == "model.layers.*.mlp*.experts"
