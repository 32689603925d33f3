import pytest
import torch
from torch import nn

import ac_core
from ac_core import ActivationCheckpointingError
from ac_core.estimation.simulate import simulate

IDS = torch.arange(256).reshape(4, 64)
BATCH = {"input_ids": IDS, "labels": IDS}


def _apply(policy):
    return lambda model: ac_core.apply_activation_checkpointing(model, policy)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_blocks_add_up_to_the_memory_of_each_backward(decoder, policy):
    found = simulate(decoder, BATCH, prepare=_apply(policy), optimizer=torch.optim.AdamW)
    timeline = dict(found.timeline)
    before = 0
    for use in found.blocks:
        assert before + use.working + use.beside == timeline[f"backward of {use.name}"]
        assert use.working >= use.kept
        before += use.kept
    assert [use.name for use in found.blocks] == [f"layers.{i}" for i in range(4)]
    assert sum(use.recompute_flops for use in found.blocks) == found.recompute_flops


def test_what_is_kept_is_what_measure_calls_saved(decoder):
    plain, full = (simulate(decoder, BATCH, prepare=_apply(policy)) for policy in ("none", "full"))
    usages = []
    for policy in ("none", "full"):
        model = decoder()
        _apply(policy)(model)
        usages.append(ac_core.measure(model, BATCH))
    # The checkpoints of a real run also keep the state of the random-number generator, which no operation allocates.
    saved = usages[0].saved_bytes - usages[1].saved_bytes
    kept = [sum(use.kept for use in found.blocks) for found in (plain, full)]
    assert kept[0] - kept[1] == pytest.approx(saved, rel=0.01)


def test_moments_are_in_the_order_of_the_step(decoder):
    found = simulate(decoder, BATCH, prepare=_apply("full"), optimizer=torch.optim.SGD)
    names = [name for name, _ in found.timeline]
    assert names == [
        "forward outside of blocks",
        *(f"forward of layers.{i}" for i in range(4)),
        "forward of head and loss",
        "backward of head and loss",
        *(f"backward of layers.{i}" for i in (3, 2, 1, 0)),
        "backward outside of blocks",
    ]  # and a plain SGD allocates nothing


def test_the_log_ends_where_a_step_must(decoder):
    found = simulate(decoder, BATCH, optimizer=torch.optim.AdamW)
    assert sum(found.log.alive(len(found.log.changes)).values()) == pytest.approx(
        sum(found.log.before.values()) + found.gradients, rel=0.01
    )
    assert found.peak == max(found.log.totals())
    assert found.end == list(found.log.totals())[found.end_entry]


def test_a_block_called_twice_and_one_never_called():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x):
            return self.layers[0](self.layers[1](self.layers[0](x))).sum()

    found = simulate(Loop, torch.randn(4, 8))
    assert [use.name for use in found.blocks] == ["layers.0", "layers.1"]
    assert found.blocks[0].forward_flops == 2 * found.blocks[1].forward_flops


def test_a_batch_may_depend_on_the_model(decoder):
    found = simulate(decoder, lambda model, blocks: {"input_ids": IDS[:, : len(blocks)], "labels": IDS[:, :4]})
    assert found.forward_flops < simulate(decoder, BATCH).forward_flops / 8


def test_autocast_keeps_the_casts(decoder):
    plain, cast = (simulate(decoder, BATCH, autocast=autocast) for autocast in (None, torch.bfloat16))
    assert cast.blocks[0].kept < plain.blocks[0].kept
    assert cast.parameters == plain.parameters


class _Images(nn.Module):
    """Puts one number an image into each row that the ids reserve for one, having dropped images of zeros."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids, pixels):
        images = pixels[(pixels == 0.0).sum(-1) != pixels.shape[-1]]
        if images.shape[0] != (ids == 7).sum():
            raise ValueError("images and tokens do not match")
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum() + images.sum()


def test_a_batch_with_padding_images_needs_their_pixels():
    pixels = torch.ones(3, 5)
    pixels[1] = 0.0
    batch = {"ids": torch.tensor([1, 7, 7, 2]), "pixels": pixels}
    assert simulate(_Images, batch).assumed_no_padding is False
    with pytest.raises(ActivationCheckpointingError, match=r"_Images fails on .*\(images and .* give the real"):
        simulate(_Images, batch | {"pixels": pixels.to("meta")})
    with pytest.raises(ValueError, match=r"^images and tokens do not match$"):
        simulate(_Images, batch | {"ids": torch.tensor([1, 7, 1, 2])})
