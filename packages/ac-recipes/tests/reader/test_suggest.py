import pytest

from ac_recipes.reader.suggest import closest, closest_named_in


@pytest.mark.parametrize(
    ("word", "options", "meant"),
    [
        ("selctive", ["full", "selective"], "selective"),
        ("Full", ["full", "selective"], "full"),
        ("activation-checkpointing", ["activation_checkpointing"], "activation_checkpointing"),
        ("zebra", ["full", "selective"], None),
        ("", ["full"], None),
        ("full", [], None),
        ("a" * 1_000_000, ["a" * 100], None),
    ],
)
def test_closest(word, options, meant):
    assert closest(word, options) == meant


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ("'trition' is not one of 'auto', 'torch', 'triton'", "triton"),
        ("'zebra' is not one of 'auto', 'torch'", None),
        ("needs 'auto' or 'torch'", None),
    ],
)
def test_a_components_own_message_gives_a_guess(message, meant):
    assert closest_named_in(message) == meant
