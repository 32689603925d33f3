import inspect
import pickle

import pytest
import torch

from ac_loss import FusedLinearCrossEntropy, reference


def test_interface_of_the_guide():
    init = inspect.signature(FusedLinearCrossEntropy).parameters
    positional = [(n, p.default) for n, p in init.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [("ignore_index", -100), ("logit_softcapping", 0), ("reduction", "sum")]
    call = inspect.signature(FusedLinearCrossEntropy.forward).parameters
    assert list(call) == ["self", "hidden_states", "labels", "lm_weight", "num_label_tokens", "grad_reduce_group"]
    assert isinstance(FusedLinearCrossEntropy(), torch.nn.Module)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {"reduction": "sum"}),
        ({"reduction": "mean", "ignore_index": 3}, {"reduction": "mean", "ignore_index": 3}),
        ({"logit_softcapping": 2.0}, {"reduction": "sum", "softcap": 2.0}),
        ({"logit_scale": 0.25}, {"reduction": "sum", "logit_scale": 0.25}),
        ({"grad_mode": "recompute"}, {"reduction": "sum"}),
        ({"label_smoothing": 0.1, "z_loss": 0.01}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01}),
        ({"reduction": "none", "accum": "param", "backend": "torch"}, {"reduction": "none"}),
    ],
)
def test_equals_the_specification(draw, options, same):
    inputs = draw((4, 5), 31, 13)
    hidden, weight, labels = inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_(), inputs["labels"]
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
    loss = FusedLinearCrossEntropy(**options)(hidden, labels, weight)
    right = reference.linear_cross_entropy(hidden, weight, labels, **same)
    torch.testing.assert_close(loss, right, rtol=1e-12, atol=0)
    got = torch.autograd.grad(loss.sum(), (hidden, weight))
    torch.testing.assert_close(got, torch.autograd.grad(right.sum(), (hidden, weight)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens", [50, torch.tensor(50)])
def test_the_sum_is_over_num_label_tokens(draw, tokens):
    inputs = draw((4, 5), 31, 13)
    arguments = inputs["hidden"], inputs["labels"], inputs["weight"]
    loss_fn = FusedLinearCrossEntropy()
    assert loss_fn(*arguments, num_label_tokens=tokens).item() == pytest.approx(loss_fn(*arguments).item() / 50)


def test_an_option_is_checked_when_the_loss_is_built():
    with pytest.raises(ValueError, match="backend: 'trition' is not one of 'auto', 'torch'"):
        FusedLinearCrossEntropy(backend="trition")
    with pytest.raises(ValueError, match="logit_softcapping: -1 is not a number of at least 0"):
        FusedLinearCrossEntropy(logit_softcapping=-1)
    with pytest.raises(ValueError, match="reduction: 'avg' is not one of 'none', 'sum', 'mean'"):
        FusedLinearCrossEntropy(reduction="avg")
    with pytest.raises(ValueError, match="grad_mode: 'forward' finishes the gradients before the backward"):
        FusedLinearCrossEntropy(reduction="none", grad_mode="forward")


def test_something_that_is_no_process_group_is_named(draw):
    inputs = draw((4, 5), 31, 13)
    with pytest.raises(TypeError, match=r"grad_reduce_group: a torch.distributed.ProcessGroup is needed, got <object"):
        FusedLinearCrossEntropy()(inputs["hidden"], inputs["labels"], inputs["weight"], grad_reduce_group=object())


def test_nothing_to_train_and_picklable():
    loss_fn = pickle.loads(pickle.dumps(FusedLinearCrossEntropy(reduction="mean", z_loss=1e-4)))
    assert not list(loss_fn.parameters()) and not loss_fn.state_dict()  # noqa: PT018
    assert repr(loss_fn) == (
        "FusedLinearCrossEntropy(ignore_index=-100, logit_softcapping=0, reduction='mean', label_smoothing=0.0, "
        "z_loss=0.0001, backend='auto', accum='fp32', logit_scale=1.0, grad_mode='auto', strict_nan=False)"
    )
