import pytest

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError
from ac_core.layers import check_layers, select_layers

NAMES = [f"model.layers.{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-1,-2:", [0, 1, 6, 7]),
        ("every:3", [0, 3, 6]),
        ("0-7", list(range(8))),
        ("0-3,6-", [0, 1, 2, 3, 6, 7]),
        ("-1", [7]),
        ("2:4, 0", [0, 2, 3]),
        (":2", [0, 1]),
        ("model.layers.[35]", [3, 5]),
    ],
)
def test_exactly_those(text, expected):
    assert check_layers(text) is None
    assert select_layers(text, NAMES) == expected


@pytest.mark.parametrize("text", ["8", "0-8", "-9", "6-12", "-9:", ":9", "4:4", "decoder.*", "every:9"])
def test_outside_of_the_model(text):
    assert check_layers(text) is None
    with pytest.raises(ValueError, match=r"8 blocks"):
        select_layers(text, NAMES)


@pytest.mark.parametrize("text", ["", "every:0", "every:", "3-1", "1,,2", "a-", 7, "1-2-3", "every:2,3"])
def test_what_is_no_selection_is_refused_when_the_config_is_read(text):
    if text == "a-":  # a glob that is a plain name; it matches nothing in a model
        assert check_layers(text) is None
        return
    with pytest.raises(ValueError, match=r"^layers: "):
        ActivationCheckpointingConfig(layers=text)


def test_apply_takes_exactly_those_blocks(stack, assert_same_step):
    model = stack(depth=8)
    report = ac_core.apply_activation_checkpointing(model, ActivationCheckpointingConfig(layers="0-1,-2:"))
    assert report.applied_blocks == ("layers.0", "layers.1", "layers.6", "layers.7")
    assert [group.reason for group in report.groups] == ["", "not among the layers", ""]
    assert_same_step(stack(depth=8), model)


def test_layers_by_part(stack):
    model = stack(depth=8)
    config = ActivationCheckpointingConfig(layers={"language": "every:4"})
    assert ac_core.apply_activation_checkpointing(model, config).applied_blocks == ("layers.0", "layers.4")
    with pytest.raises(ActivationCheckpointingError, match=r"'vision' is no part of this model.*\['language'\]"):
        ac_core.apply_activation_checkpointing(
            stack(), ActivationCheckpointingConfig(layers={"language": "0", "vision": "0"})
        )


def test_a_range_outside_of_the_model_names_the_part(stack):
    with pytest.raises(ActivationCheckpointingError, match=r"^layers: '0-8'.*outside of the 4 blocks 0-3.*'language'"):
        ac_core.apply_activation_checkpointing(stack(), ActivationCheckpointingConfig(layers="0-8"))
