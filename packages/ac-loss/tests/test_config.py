import dataclasses
import importlib.metadata
import inspect

import pytest

from ac_loss import FusedLinearCrossEntropy
from ac_loss.config import LossConfig


def test_defaults():
    assert dataclasses.asdict(LossConfig()) == {
        "kind": "fused",
        "backend": "auto",
        "accum": "fp32",
        "grad_mode": "auto",
        "ignore_index": -100,
        "logit_softcapping": 0.0,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "logit_scale": 1.0,
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "fusd", "kind: 'fusd' is not one of 'fused', 'plain'"),
        ("backend", "trition", "backend: 'trition' is not one of 'auto', 'torch', 'triton', 'liger', 'cce', 'native'"),
        ("backend", None, "backend: None is not one of 'auto', 'torch', 'triton', 'liger', 'cce', 'native'"),
        ("accum", "bf16", "accum: 'bf16' is not one of 'fp32', 'param', 'main_grad'"),
        ("grad_mode", "backward", "grad_mode: 'backward' is not one of 'auto', 'forward', 'recompute'"),
        ("ignore_index", "-100", "ignore_index: '-100' is not an integer"),
        ("ignore_index", True, "ignore_index: True is not an integer"),
        ("logit_softcapping", -30.0, "logit_softcapping: -30.0 is not a number of at least 0"),
        ("logit_softcapping", float("inf"), "logit_softcapping: inf is not a number of at least 0"),
        ("label_smoothing", 1.5, "label_smoothing: 1.5 is not a number of at least 0 and at most 1"),
        ("label_smoothing", True, "label_smoothing: True is not a number of at least 0 and at most 1"),
        ("z_loss", float("nan"), "z_loss: nan is not a number of at least 0"),
        ("logit_scale", 0, "logit_scale: 0 is not a number above 0"),
        ("z_loss", "1e-4", "z_loss: '1e-4' is not a number of at least 0"),
    ],
)
def test_a_wrong_value_is_named(field, value, message):
    with pytest.raises(ValueError, match=r".") as caught:
        LossConfig(**{field: value})
    assert str(caught.value) == message


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().kind = "plain"
    with pytest.raises(TypeError):
        LossConfig("fused")


def test_every_setting_of_the_fused_loss_reaches_the_module():
    settings = {field.name for field in dataclasses.fields(LossConfig)} - {"kind"}
    assert settings == set(inspect.signature(FusedLinearCrossEntropy).parameters) - {"reduction", "strict_nan"}


def test_registered_for_recipes():
    (entry,) = importlib.metadata.entry_points(group="ac.config", name="loss_fn")
    assert entry.load() is LossConfig
