"""Settings are normalised, and refused with the field, the value and the valid values."""

import subprocess
import sys

import pytest

from ac_core import ActivationCheckpointingConfig, DDPConfig, FSDP2Config, MegatronFSDPConfig


@pytest.mark.parametrize(
    ("given", "policy"), [(True, "full"), ("full", "full"), (False, "none"), (None, "none"), ("none", "none")]
)
def test_a_policy_is_stored_by_name(given, policy):
    assert ActivationCheckpointingConfig(policy=given).policy == policy
    assert FSDP2Config(activation_checkpointing=given).checkpointing.policy == policy


def test_an_unknown_policy_names_field_value_and_choices():
    with pytest.raises(ValueError, match=r"^policy: 'selctive' is not one of true, false, 'none', 'full', 'selective'"):
        ActivationCheckpointingConfig(policy="selctive")
    with pytest.raises(ValueError, match=r"^activation_checkpointing: 1 is not one of"):
        FSDP2Config(activation_checkpointing=1)


@pytest.mark.parametrize("budget", ["24GiB", 2**30, 0.5, "50%", "device"])
def test_a_budget_is_stored_as_it_was_asked(budget):
    assert ActivationCheckpointingConfig(policy="budget", memory_budget=budget).memory_budget == budget


def test_a_budget_belongs_to_its_policy_and_that_to_a_budget():
    with pytest.raises(ValueError, match=r"^memory_budget: policy 'budget' needs one, such as '24GiB'"):
        ActivationCheckpointingConfig(policy="budget")
    with pytest.raises(ValueError, match=r"^memory_budget: '24GiB' belongs to policy 'budget'.* is 'full'"):
        ActivationCheckpointingConfig(memory_budget="24GiB")
    with pytest.raises(ValueError, match=r"^plan: .* belongs to policy 'budget'"):
        ActivationCheckpointingConfig(policy="selective", plan={"layers.0": "full"})
    with pytest.raises(ValueError, match=r"^memory_budget: '24gib'.*did you mean 24GiB"):
        ActivationCheckpointingConfig(policy="budget", memory_budget="24gib")
    with pytest.raises(ValueError, match=r"^activation_checkpointing: 'budget' needs a budget"):
        DDPConfig(activation_checkpointing="budget")


def test_a_plan_is_stored_as_plain_data():
    plan = {"layers.0": "none", "layers.1": ["attention", "mlp.*"]}
    config = ActivationCheckpointingConfig(policy="budget", plan=plan)
    assert config.plan == {"layers.0": "none", "layers.1": ("attention", "mlp.*")}
    assert FSDP2Config(activation_checkpointing=config).checkpointing is config
    for plan in ({}, ["full"], {0: "full"}):
        with pytest.raises(ValueError, match=r"^plan: .* does not say by block name"):
            ActivationCheckpointingConfig(policy="budget", plan=plan)


def test_a_budget_beside_a_plan_is_the_one_that_it_was_made_for():
    planned = {"policy": "budget", "plan": {"layers.0": "full"}}
    config = ActivationCheckpointingConfig(
        **planned, memory_budget="1GiB", planned_for={"memory_budget": 2**30, "batch": 4}
    )
    assert config.planned_for == {"memory_budget": 2**30, "batch": 4}, "the same in other words, and more"
    with pytest.raises(ValueError, match=r"^memory_budget: '10KiB' would count for nothing.* made for '1GiB'.*null"):
        ActivationCheckpointingConfig(**planned, memory_budget="10KiB", planned_for={"memory_budget": "1GiB"})
    for unsaid in (None, {}, {"batch": 4}):
        with pytest.raises(ValueError, match=r"^memory_budget: 0.5 would count for nothing.* does not say"):
            ActivationCheckpointingConfig(**planned, memory_budget=0.5, planned_for=unsaid)
        assert ActivationCheckpointingConfig(**planned, planned_for=unsaid).memory_budget is None
    for nonsense in ("1GiB", {"memory_budget": None}, {1: 2}, {"memory_budget": "much"}):
        with pytest.raises(ValueError, match=r"^planned_for: "):
            ActivationCheckpointingConfig(**planned, planned_for=nonsense)
    without = ActivationCheckpointingConfig(policy="budget", memory_budget=0.5, planned_for={"memory_budget": 0.7})
    assert without.planned_for is None


@pytest.mark.parametrize("policy", ["selective", "budget"])
def test_megatron_fsdp_names_the_strategies_that_can(policy):
    budget = {"memory_budget": 0.5} if policy == "budget" else {}
    for asked in (policy, ActivationCheckpointingConfig(policy=policy, **budget)):
        with pytest.raises(ValueError, match="'fsdp2' or 'ddp'"):
            MegatronFSDPConfig(activation_checkpointing=asked)
    assert MegatronFSDPConfig(activation_checkpointing=True).checkpointing.policy == "full"


@pytest.mark.parametrize("scope", ["languge", [], ["vision", "text"], 3, None, {}])
def test_a_bad_scope_is_refused(scope):
    with pytest.raises(ValueError, match=r"^scope: "):
        ActivationCheckpointingConfig(scope=scope)
    with pytest.raises(ValueError, match=r"^activation_checkpointing_scope: "):
        FSDP2Config(activation_checkpointing_scope=scope)


def test_a_list_of_scopes_is_stored_as_a_tuple():
    assert ActivationCheckpointingConfig(scope=["language", "vision"]).scope == ("language", "vision")


def test_a_scope_given_twice_must_agree():
    inner = ActivationCheckpointingConfig(scope="vision")
    assert FSDP2Config(activation_checkpointing=inner).checkpointing.scope == "vision"
    with pytest.raises(ValueError, match="contradicts"):
        FSDP2Config(activation_checkpointing=inner, activation_checkpointing_scope="language")


@pytest.mark.parametrize("field", ["dp_replicate_size", "tp_size", "ep_size", "dp_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_a_size_is_a_whole_number_of_ranks(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        FSDP2Config(**{field: value})


def test_a_config_is_for_its_own_strategy():
    with pytest.raises(ValueError, match="^strategy: 'ddp' is not 'fsdp2'"):
        FSDP2Config(strategy="ddp")


@pytest.mark.parametrize("field", ["strict", "early_stop", "preserve_rng_state"])
def test_switches_are_true_or_false(field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        ActivationCheckpointingConfig(**{field: "yes"})


def test_settings_load_without_torch():
    script = "import sys, ac_core, ac_core.config, ac_core.strategies; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_public_name_is_there():
    import ac_core

    assert all(getattr(ac_core, name) is not None for name in ac_core.__all__)
    with pytest.raises(AttributeError, match="no attribute 'chekpoint'"):
        _ = ac_core.chekpoint
