import copy
import dataclasses
import pickle
from importlib.metadata import entry_points

import pytest

from ac_moe.config import MoEConfig


def test_defaults() -> None:
    assert dataclasses.asdict(MoEConfig()) == {
        "dispatcher": "alltoall",
        "experts": "torch_mm",
        "dispatcher_recompute_cache": "none",
    }
    for mode in ("none", "combine", "moe_tail"):
        assert MoEConfig(dispatcher="hybridep").dispatcher == "hybridep"
        assert MoEConfig(dispatcher_recompute_cache=mode).dispatcher_recompute_cache == mode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dispatcher": "foo"}, "dispatcher: 'foo' is not one of 'alltoall', 'hybridep'"),
        ({"dispatcher": None}, "dispatcher: None is not one of 'alltoall', 'hybridep'"),
        ({"dispatcher": ["alltoall"]}, "dispatcher: ['alltoall'] is not one of 'alltoall', 'hybridep'"),
        ({"experts": "te"}, "experts: 'te' is not one of 'torch_mm'"),
        (
            {"dispatcher_recompute_cache": False, "experts": ""},
            "experts: '' is not one of 'torch_mm'\n"
            "dispatcher_recompute_cache: False is not one of 'none', 'combine', 'moe_tail'",
        ),
    ],
)
def test_mistakes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=": ") as caught:
        MoEConfig(**settings)
    assert str(caught.value) == message


def test_is_frozen_keyword_only_data() -> None:
    config = MoEConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dispatcher = "alltoall"
    with pytest.raises(TypeError):
        MoEConfig("alltoall")
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_is_registered() -> None:
    (point,) = entry_points(group="ac.config", name="model.backend")
    assert point.load() is MoEConfig
