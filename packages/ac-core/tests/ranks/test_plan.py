"""A plan, which has something else for each block, has the numbers and the traffic of no checkpointing on two ranks."""

import pytest
import torch
from ac_core_cases import CASES, TENSOR_PARALLEL, sharded
from ac_core_decoder import Decoder
from ac_core_training import Outcome, outcomes

from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError, apply_activation_checkpointing

KEPT = ["attention", *(f"attention.{name}" for name in "qkvo"), "mlp.gate"]
OFFLOADED = {"layers.0": "offload", "layers.1": ["offload", *KEPT], "layers.2": "none"}
PLAN = {"layers.0": "full", "layers.1": KEPT, "layers.2": "none"}
OPTIONS = {
    "none": {"attention": ["attention"], "projections": KEPT[:-1], "gate and up": [*KEPT, "mlp.up"]},
    "cpu": {"offload": "offload", "offload, gate": ["offload", *KEPT]},
}
SOME = (
    "fsdp2",
    "fsdp2, bf16",
    "fsdp2, units inside of blocks, applied after",
    "fsdp2, adapters",
    "ddp, static graph",
    "ddp, applied after",
    "tensor parallel",
)


def train(rank: int, case: str) -> dict[str, Outcome]:
    # Adapters take the place of the projections, so that other modules are there to be named.
    plan = PLAN if "adapters" not in case else PLAN | {"layers.1": ["attention", "mlp.down.base"]}
    config = ActivationCheckpointingConfig(policy="budget", plan=plan)
    return outcomes(rank, CASES[case], {"none": "none", "plan": config})


def train_by_options(rank: int, case: str, *, offload: bool) -> dict[str, Outcome]:
    """Each option for all blocks; with `offload`, those and a mix in which inputs go to the host."""
    where = "cpu" if offload else "none"
    plans = {name: dict.fromkeys(PLAN, option) for name, option in OPTIONS[where].items()}
    plans |= {"mixed": OFFLOADED} if offload else {}
    configs = {n: ActivationCheckpointingConfig(policy="budget", plan=p, offload=where) for n, p in plans.items()}
    return outcomes(rank, CASES[case], {"none": "none", **configs})


def plan_for_shards(rank: int) -> str:
    ids = torch.zeros(2, 8, dtype=torch.long)
    config = ActivationCheckpointingConfig(policy="budget", memory_budget=0.5)
    with pytest.raises(ActivationCheckpointingError) as told:
        apply_activation_checkpointing(sharded(Decoder(depth=1)), config, batch=(ids, ids))
    return str(told.value)


def test_a_sharded_model_is_not_planned_for(ranks):
    assert all("sharded already" in told and "ac_core.plan(" in told for told in ranks.run(plan_for_shards))


@pytest.mark.parametrize("case", SOME)
def test_a_mixed_plan(ranks, case):
    for outcome in ranks.run(train, case=case):
        none, plan = outcome["none"], outcome["plan"]
        assert plan.different == []
        assert plan.applied == 2
        assert plan.saved < none.saved
        assert none.matmuls < plan.matmuls
        assert plan.grown <= 0
        assert case in TENSOR_PARALLEL or plan.collectives == none.collectives


@pytest.mark.parametrize("case", ["fsdp2, bf16", "ddp"])
@pytest.mark.parametrize("offload", [False, True])
def test_every_option_alone_and_mixed(ranks, case, offload):
    for outcome in ranks.run(train_by_options, timeout=300.0, case=case, offload=offload):
        none = outcome.pop("none")
        assert {name: found.different for name, found in outcome.items()} == {name: [] for name in outcome}
        assert all(found.applied == (2 if name == "mixed" else 3) for name, found in outcome.items())
        assert all(found.collectives == none.collectives for found in outcome.values())
        assert all(found.grown <= 0 for found in outcome.values())
        assert all(found.saved < none.saved for found in outcome.values())
