import pytest

from ac_core import estimate
from ac_core.advice import FUSED_LOSS


@pytest.mark.parametrize(
    ("settings", "group", "remedy"),
    [
        ({"batch_size": 64, "sequence_length": 64}, "head and loss", "loss='fused'"),
        ({"batch_size": 64, "sequence_length": 64, "policy": "none", "loss": "fused"}, "activations", "policy='full'"),
        ({"batch_size": 64, "sequence_length": 64, "loss": "fused"}, "activations", "fused kernels or fewer tokens"),
        ({"batch_size": 1, "sequence_length": 8}, "optimizer state", "(strategy='fsdp2', dp_size=2, or more)"),
        (
            {"batch_size": 1, "sequence_length": 8, "strategy": "fsdp2"},
            "optimizer state",
            "(strategy='fsdp2', dp_size=2, or more)",
        ),
        ({"batch_size": 1, "sequence_length": 8, "strategy": "ddp", "dp_size": 2}, "optimizer state", "='fsdp2')"),
    ],
)
def test_what_dominates_and_what_would_help(decoder, settings, group, remedy):
    found = estimate(decoder, **settings)
    first, _, rest = str(found.advice).partition(" take ")
    assert group in first
    assert remedy in rest
    assert found.dominant in rest


def test_it_says_how_much_a_fused_loss_can_help(decoder):
    found = estimate(decoder, batch_size=64, sequence_length=64, policy="full")
    rest = max(size for name, size in found.timeline if "head and loss" not in name)
    assert f"by at most {1 - rest / found.peak_bytes:.0%}" in str(found.advice)


def test_who_shows_it_chooses_the_words(decoder):
    found = estimate(decoder, batch_size=64, sequence_length=64)
    assert FUSED_LOSS in found.advice.parts
    told = found.advice.text(lambda change: f"<{change.setting} as {change.value}>")
    assert told == str(found.advice).replace("loss='fused'", "<loss as fused>")
    assert found.to_dict()["advice"] == str(found.advice) in str(found)
