"""Plans for transformers' models, against what the real ones take."""

import pytest
import torch

import ac_core
from ac_core.planning.measuring import measured
from ac_core.planning.planner import fit

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama():
    """In bfloat16, where norms keep their input in fp32 and not the tensor between the blocks."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_hidden_layers=6))
    return model.to(torch.bfloat16), {}


def qwen3_moe():
    """Norms between the projections of an attention, a router, grouped experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(**SMALL, **experts, num_hidden_layers=5)
    return transformers.Qwen3MoeForCausalLM(config), {}


def llava():
    """Blocks of two kinds, a connector, and a head of the tower that no gradient comes to."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**vision, num_hidden_layers=4),
        text_config=transformers.LlamaConfig(**SMALL, num_hidden_layers=5),
        image_token_index=5,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


@pytest.mark.parametrize(("build", "share"), [(llama, 0.7), (qwen3_moe, 0.7), (llava, 0.7)])
def test_the_plan_takes_what_it_says(bench_for, resident, build, share):
    torch.manual_seed(0)
    model, more = build()
    ids = torch.arange(80).reshape(2, 40) + 10
    ids[:, :16] = 5
    batch = {"input_ids": ids, "labels": ids.clone(), **more}
    bench = bench_for(model, batch)
    plan = fit(share, bench, *measured(bench))
    ac_core.apply_activation_checkpointing(model, plan.to_config())
    usage = ac_core.measure(model, batch)
    peak = usage.peak_bytes + resident(model, batch)
    assert peak <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(peak, rel=0.003)
    assert plan.saved_bytes == pytest.approx(usage.saved_bytes, rel=0.003)
    assert plan.recompute_flops == usage.recompute_flops
    assert ac_core.verify(model, batch, None).equal
    assert len(set(plan.blocks.values())) > 1
