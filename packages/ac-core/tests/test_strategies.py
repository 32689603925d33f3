"""The strategies of the guide and their fields."""

from dataclasses import FrozenInstanceError, fields

import pytest

from ac_core import ActivationCheckpointingConfig, DDPConfig, FSDP2Config, MegatronFSDPConfig

STRATEGIES = {"fsdp2": FSDP2Config, "ddp": DDPConfig, "megatron_fsdp": MegatronFSDPConfig}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_fields_of_the_guide_and_their_defaults(strategy):
    config = STRATEGIES[strategy](strategy=strategy)
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "strategy": strategy,
        "activation_checkpointing": "none",
        "activation_checkpointing_scope": "all",
        "activation_checkpointing_offload": "none",
        "dp_size": None,
        "dp_replicate_size": 1,
        "tp_size": 1,
        "cp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
    }
    with pytest.raises(FrozenInstanceError):
        config.tp_size = 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_policy_and_scope_become_one_config(strategy):
    config = STRATEGIES[strategy](activation_checkpointing=True, activation_checkpointing_scope=["language", "vision"])
    assert config.checkpointing == ActivationCheckpointingConfig(policy="full", scope=("language", "vision"))


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_offload_is_for_fsdp2_and_ddp(strategy):
    config = STRATEGIES[strategy](activation_checkpointing=True, activation_checkpointing_offload="cpu")
    assert config.checkpointing == ActivationCheckpointingConfig(policy="full", offload="cpu")
    inner = ActivationCheckpointingConfig(offload="cpu")
    assert STRATEGIES[strategy](activation_checkpointing=inner).checkpointing is inner
    for given, message in (
        ({"activation_checkpointing_offload": "gpu"}, "'gpu' is not one of 'none', 'cpu'"),
        ({"activation_checkpointing_offload": "cpu"}, "with activation_checkpointing 'none' none are"),
        (
            {
                "activation_checkpointing_offload": "cpu",
                "activation_checkpointing": ActivationCheckpointingConfig(),
            },
            "contradicts the offload 'none' given inside",
        ),
    ):
        with pytest.raises(ValueError, match=f"^activation_checkpointing_offload: .*{message}"):
            STRATEGIES[strategy](**given)


@pytest.mark.parametrize(
    "given",
    [
        {"activation_checkpointing": True, "activation_checkpointing_offload": "cpu"},
        {"activation_checkpointing": ActivationCheckpointingConfig(offload="cpu")},
    ],
    ids=["beside", "inside"],
)
def test_offload_is_refused_by_megatron_fsdp(given):
    with pytest.raises(ValueError, match=r"^activation_checkpointing_offload: .*not supported.*'fsdp2' or 'ddp'"):
        MegatronFSDPConfig(**given)


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_selective_is_for_fsdp2_and_ddp(strategy):
    assert STRATEGIES[strategy](activation_checkpointing="selective").checkpointing.policy == "selective"


@pytest.mark.parametrize("strict", [True, False])
def test_selective_inside_of_a_whole_config_is_refused_by_megatron_fsdp_too(strict):
    inner = ActivationCheckpointingConfig(policy="selective", strict=strict)
    with pytest.raises(ValueError, match=r"^activation_checkpointing: 'selective' is not supported.*'fsdp2' or 'ddp'"):
        MegatronFSDPConfig(activation_checkpointing=inner)


def test_a_scope_given_twice_the_same_is_no_contradiction():
    inner = ActivationCheckpointingConfig(scope=["vision", "language"])
    config = FSDP2Config(activation_checkpointing=inner, activation_checkpointing_scope=["language", "vision"])
    assert config.checkpointing is inner
    inner = ActivationCheckpointingConfig(scope="language")
    config = FSDP2Config(activation_checkpointing=inner, activation_checkpointing_scope=["language"])
    assert config.checkpointing is inner
