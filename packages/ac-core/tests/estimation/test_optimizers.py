import pytest
import torch

from ac_core import estimate
from ac_core.estimation.optimizers import optimizer_factory


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_names(name, kind):
    built = optimizer_factory(name, "cpu")([torch.nn.Parameter(torch.ones(2))])
    assert isinstance(built, kind)
    assert built.defaults["foreach"] is False
    assert optimizer_factory("none", "cpu") is None
    assert optimizer_factory(kind, "cuda") is kind


def test_on_cuda_an_optimizer_steps_on_everything_at_once(decoder):
    scratch = {
        device: dict(estimate(decoder, batch_size=1, sequence_length=8, device=device).timeline)["optimizer step"]
        for device in ("cpu", "cuda")
    }
    size = estimate(decoder, batch_size=1, sequence_length=8).parameter_bytes
    assert scratch["cuda"] - scratch["cpu"] > 0.7 * size
