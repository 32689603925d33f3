import pytest
import torch

import ac_core
from ac_core.estimation.categories import CATEGORIES, LOSS, categorise, family, kept_by_block, shares
from ac_core.estimation.simulate import simulate

IDS = torch.arange(256).reshape(4, 64)


@pytest.fixture
def simulation(decoder):
    return simulate(
        decoder,
        {"input_ids": IDS, "labels": IDS},
        prepare=lambda model: ac_core.apply_activation_checkpointing(model, "none"),
        optimizer=torch.optim.AdamW,
    )


def test_every_storage_has_one_category(simulation):
    category = categorise(simulation.log, simulation.known)
    assert set(category) == set(simulation.log.births)
    assert set(category.values()) <= set(CATEGORIES)
    share = shares(simulation.log, category, simulation.peak_entry)
    assert sum(share.at_peak.values()) == simulation.peak
    assert all(share.most[name] >= share.at_peak[name] for name in CATEGORIES)
    logits = 4 * 256 * 512
    assert share.most[LOSS] >= 3 * logits
    assert share.most["gradients"] == simulation.gradients


def test_kept_bytes_by_block_and_family(simulation):
    category = categorise(simulation.log, simulation.known)
    kept = kept_by_block(simulation.log, category, simulation.log.alive(simulation.end_entry))
    assert set(kept) == {"", *(f"layers.{i}" for i in range(4))}
    blocks = {use.name: use.kept for use in simulation.blocks}
    # The output of the last block is read by the norm behind it, and by nothing of head and loss.
    assert all(sum(kept[name].values()) == size for name, size in blocks.items())
    row = 4 * 256 * 64
    assert kept["layers.1"]["attention"] == row + 4 * 256 * 4  # output, and a number a head and row
    assert kept["layers.1"]["matmul"] == 3 * row + 6 * row  # queries, keys and values; gate and up


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("addmm", "matmul"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("native_layer_norm", "norm"),
        ("silu", "activation function"),
        ("_to_copy", "cast or copy"),
        ("mul", "elementwise"),
        ("native_dropout", "dropout"),
        ("nonzero", "other"),
    ],
)
def test_families(op, expected):
    assert family(op) == expected
