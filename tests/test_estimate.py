"""`ac_core.estimate` against real steps, and against the fused loss whose memory it describes."""

import pytest
import torch

import ac_core
from ac_core.estimation import losses
from ac_loss.backends.torch_backend import chunking
from ac_recipes.analysis.subject import step_settings

pytest.importorskip("transformers")

from tools.estimate.accuracy import CASES, DTYPES, Case, compare
from tools.estimate.guide import ROWS, VARIANTS, predicted
from tools.estimate.plans import Shipped
from tools.estimate.recipe_step import real_step

SAMPLE = [
    (Case("Llama", "selective"), "fp32"),
    (Case("Llama", "full", "fused"), "bf16"),
    (Case("Llama", "full", "fused", strategy="fsdp2"), "fp32"),
    (Case("Llama with LoRA", "none"), "bf16"),
    (Case("Qwen3-MoE", "full"), "fp32"),
    (Case("LLaVA, frozen tower", "full"), "bf16"),
    (Case("Qwen2.5-VL", "selective"), "fp32"),
    (Case("SmolVLM", "full"), "bf16"),
    (Case("Llama, packed rows", "full"), "fp32"),
]


def test_the_sample_is_of_the_comparison():
    assert all(case in CASES and dtype in DTYPES for case, dtype in SAMPLE)


@pytest.mark.parametrize(("case", "dtype"), SAMPLE, ids=str)
def test_predicted_peaks_are_within_three_percent(case, dtype):
    assert abs(compare(case, dtype).error) < 0.03


@pytest.mark.parametrize("dispatcher", ["hybridep", "alltoall"])
def test_ranks_that_share_experts_take_what_was_predicted(dispatcher):
    recipe = Shipped("qwen3-moe", (f"--model.backend.dispatcher={dispatcher}",), ranks=2).load()
    settings = step_settings(recipe, device="cpu", kernels="plain")
    predicted = ac_core.estimate(policy=recipe.distributed.checkpointing, **settings)
    for measured in real_step(recipe, 2, route="evenly"):
        assert predicted.peak_bytes == pytest.approx(measured.peak, rel=0.01)


def test_chunks_are_those_of_the_fused_loss():
    for tokens in (1, 100, 257, 4096, 16384, 1_000_003):
        for vocab in (50, 2048, 128256, 10**6):
            for itemsize in (2, 4, 8):
                for sum_bytes in (0, 2**28):
                    ours, theirs = losses.chunk_rows, chunking.chunk_rows
                    sizes = (tokens, vocab, itemsize)
                    assert ours(*sizes, sum_bytes=sum_bytes) == theirs(*sizes, sum_bytes=sum_bytes)
    for device in ("cpu", "cuda"):
        for row_bytes in (100, 2**20, 2**30):
            assert losses.block_rows(device, row_bytes) == chunking.block_rows(device, row_bytes)
            assert losses.slab_rows(device, row_bytes) == chunking.slab_rows(device, row_bytes)


@pytest.mark.parametrize("row", [ROWS[0], ROWS[-1]], ids=lambda row: row.name)
def test_the_guides_figures_are_met(row):
    found = predicted(row, VARIANTS["as published"])
    assert found.peak_bytes / 2**30 == pytest.approx(row.published, rel=0.05)
    assert found.parameter_bytes == pytest.approx(2 * 1_235_814_400 / (8 if "FSDP" in row.name else 1), rel=0.001)


def test_the_whole_recipe_fits_in_eight_gigabytes():
    found = predicted(ROWS[-1], {}, dtype=torch.bfloat16)
    assert found.peak_bytes < 7.5e9
