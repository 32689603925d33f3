"""A plan, which has something else for each block, has the numbers and the traffic of no checkpointing on two ranks."""

import pytest
from ac_core_cases import CASES, TENSOR_PARALLEL
from ac_core_training import Outcome, outcomes

from ac_core import ActivationCheckpointingConfig

KEPT = ["attention", *(f"attention.{name}" for name in "qkvo"), "mlp.gate"]
PLAN = {"layers.0": "full", "layers.1": KEPT, "layers.2": "none"}
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
