import dataclasses

import pytest

import ac_moe
from ac_moe.cache.conditions import LayerFacts, check_moe_tail

UNMET = {
    "activation_checkpointing": (False, "activation checkpointing is off: there is no recompute; switch it on"),
    "dispatcher": ("allgather", "dispatcher: 'allgather' is not 'alltoall' or 'hybridep'"),
    "experts": ("te", "experts: 'te' is not 'torch_mm', torch's grouped GEMM"),
    "expert_bias": (True, "the down projection adds a bias to its output"),
    "weight_applied_after": (
        True,
        "the router weight is applied after the down projection: apply it inside the activation",
    ),
    "fp8": (True, "the experts multiply in fp8"),
    "latent": (True, "a latent projection reads the output of the experts"),
    "lora_on_down": (
        True,
        "LoRA adds to the output of the down projection: leave the down projection out of its targets",
    ),
    "other_reader": ("a z-loss", "a z-loss reads the output of the down projection"),
}


def test_what_a_layer_needs() -> None:
    assert LayerFacts().unmet() == ()
    check_moe_tail({})
    check_moe_tail({"layers.0.moe": LayerFacts(), "layers.1.moe": LayerFacts(dispatcher="hybridep")})


@pytest.mark.parametrize("field", UNMET)
def test_each_condition(field: str) -> None:
    value, text = UNMET[field]
    assert LayerFacts(**{field: value}).unmet() == (text,)


def test_every_fact_has_a_condition() -> None:
    assert [field.name for field in dataclasses.fields(LayerFacts)] == list(UNMET)


def test_one_error_names_every_unmet_condition_of_every_layer() -> None:
    everything = LayerFacts(**{field: value for field, (value, _) in UNMET.items()})
    biased = LayerFacts(expert_bias=True)
    with pytest.raises(ac_moe.MoETailError) as caught:
        check_moe_tail({"0": biased, "1": LayerFacts(), "2": everything, "3": biased})
    assert str(caught.value) == (
        "moe_tail needs a down projection whose output only feeds a combine. Not met:\n"
        "0, 3:\n"
        "  * the down projection adds a bias to its output\n"
        "2:\n" + "".join(f"  * {text}\n" for _, text in UNMET.values()) + "Use mode 'combine', which asks for none of "
        "these but a dispatcher of ac-moe and a checkpoint, or 'none'."
    )
    assert set(caught.value.unmet) == {text for _, text in UNMET.values()}
    assert isinstance(caught.value, ValueError)
