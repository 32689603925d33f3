"""Every way to train on two ranks has the same numbers, traffic and leftovers under every policy."""

import pytest
from ac_core_cases import CASES, DDP, FSDP2, TENSOR_PARALLEL
from ac_core_decoder import VOCABULARY, WIDTH, Decoder
from ac_core_training import Meter
from torch import ones

DEPTH = 3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_numbers_are_those_without_checkpointing(trained, case, policy):
    for outcome in trained(case):
        assert outcome[policy].applied == DEPTH
        assert outcome[policy].different == []


@pytest.mark.parametrize("case", CASES)
def test_selective_is_between_full_and_none(trained, case):
    for outcome in trained(case):
        none, full, selective = outcome["none"], outcome["full"], outcome["selective"]
        # Frozen products are worth as much as others: with adapters too, the recompute runs no more than half of them.
        assert none.matmuls < selective.matmuls <= (none.matmuls + full.matmuls) / 2
        assert full.saved < selective.saved < none.saved


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_nothing_is_left_over(trained, case, policy):
    for outcome in trained(case):
        assert outcome[policy].grown <= 0
        assert outcome[policy].sharded == (case in FSDP2 or case == "sequence parallel")


@pytest.mark.parametrize("case", FSDP2 | DDP)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_recompute_gathers_and_reduces_nothing_again(trained, case, policy):
    for outcome in trained(case):
        assert outcome[policy].collectives == outcome["none"].collectives


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_selective_keeps_the_collectives_inside_of_a_block(trained, case):
    for outcome in trained(case):
        assert outcome["selective"].collectives == outcome["none"].collectives
        assert outcome["full"].collectives.total() > outcome["none"].collectives.total()


def test_full_keeps_one_boundary_tensor_a_block_on_ddp_as_on_fsdp2(trained):
    without_blocks, ids = Decoder(depth=0), ones(2, 8).long() % VOCABULARY
    with Meter(without_blocks.parameters()) as meter:
        loss = without_blocks(ids, ids)
        outside = meter.alive()
    loss.backward()
    boundary = ids.numel() * WIDTH * 4
    for ddp, fsdp2 in zip(trained("ddp"), trained("fsdp2"), strict=True):
        assert ddp["full"].saved == fsdp2["full"].saved == outside + DEPTH * boundary


@pytest.mark.parametrize("kind", ["", ", lower half frozen", ", adapters"])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_ddp_saves_what_fsdp2_saves(trained, policy, kind):
    for ddp, fsdp2 in zip(trained(f"ddp{kind}"), trained(f"fsdp2{kind}"), strict=True):
        assert ddp[policy].saved == fsdp2[policy].saved
