"""What lazy logits understand, against the same calls on real logits."""

import pytest
import torch
import torch.nn.functional as F

from ac_loss import LossConfig
from ac_loss.huggingface import FusedLossError, LazyLogits
from ac_loss.huggingface.head import lazy_linear
from ac_loss.huggingface.origin import Origin

B, S, H, V = 2, 5, 4, 7


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {"hidden": normal(B, S, H), "weight": normal(V, H), "bias": normal(V), "scalar": normal()}


@pytest.fixture
def labels():
    return torch.tensor([[1, 2, -100, 3, 6], [0, 5, 4, -100, 2]])


def lazy(leaves, **config):
    origin = Origin("Model", LossConfig(**config))
    return lazy_linear(leaves["hidden"], leaves["weight"], leaves["bias"], origin)


def real(leaves):
    return F.linear(leaves["hidden"], leaves["weight"], leaves["bias"])


def gradients(loss, leaves):
    return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


def assert_same(compute, leaves):
    """`compute` takes logits and returns a loss, whose gradients have to be the same too."""
    expected, got = compute(real(leaves)), compute(lazy(leaves))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def in_place(function):
    def step(x, *rest):
        x = x.clone()
        function(x, *rest)
        return x

    return step


ELEMENTWISE = {
    "scale": lambda x, _: x * 0.25,
    "scale from the left": lambda x, _: 0.25 * x,
    "divisor": lambda x, _: x / 8.0,
    "scale in place": lambda x, _: in_place(lambda y: y.mul_(0.25))(x),
    "augmented": lambda x, _: in_place(lambda y: y.__itruediv__(2))(x),
    "scalar tensor": lambda x, leaves: x * leaves["scalar"],
    "divided by a scalar tensor": lambda x, leaves: x / leaves["scalar"].reshape(1),
    "softcap": lambda x, _: torch.tanh(x / 2.0) * 2.0,
    "scale and softcap": lambda x, _: 3 * (x * 0.7 / 2.0).tanh(),
    "tanh alone": lambda x, _: x.tanh(),
    "halved softcap": lambda x, _: (x / 3).tanh_() * 3 / 2,
    "bias": lambda x, leaves: x + leaves["bias"].reshape(1, V),
    "bias behind a scale": lambda x, leaves: leaves["bias"] + x * 0.5,
    "casts": lambda x, leaves: x.to(torch.float64).double().type_as(leaves["bias"]).contiguous().clone(),
    "a sum of two": lambda x, _: x + 0.5 * (x * 3),
    "a sum behind a scale": lambda x, leaves: (x * 2 + x) * leaves["scalar"],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name, leaves, labels):
    def compute(logits):
        return F.cross_entropy(ELEMENTWISE[name](logits, leaves).view(-1, V), labels.view(-1))

    assert_same(compute, leaves)


ROWS = {
    "shift": lambda x, y: (x[..., :-1, :].contiguous().view(-1, V), y[..., 1:].reshape(-1)),
    "shift in two dimensions": lambda x, y: (x[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)),
    "mask": lambda x, y: (x[y != -100], y[y != -100]),
    "mask of a dimension": lambda x, y: (x[:, torch.tensor([True, False, True, True, False])][0], y[0, [0, 2, 3]]),
    "chosen rows": lambda x, y: (x[:, torch.tensor([0, 3])].flatten(0, 1), y[:, [0, 3]].flatten()),
    "a list of rows": lambda x, y: (x[[1, 0], [2, 1]], y[[1, 0], [2, 1]]),
    "one row": lambda x, y: (x[1, 2], y[1, 2]),
    "new dimensions": lambda x, y: (x[None].unsqueeze(0).squeeze(0).squeeze(0)[0], y[0]),
    "flatten": lambda x, y: (torch.flatten(x, end_dim=1), y.flatten()),
    "unflatten": lambda x, y: (x.view(-1, V).unflatten(0, (S, B))[1], y.view(S, B)[1]),
    "classes in dimension 1": lambda x, y: (x.transpose(1, 2), y),
    "permuted": lambda x, y: (x.permute(1, 2, 0), y.t()),
    "batch last": lambda x, y: (x.transpose(0, 1).reshape(-1, V), y.t().reshape(-1)),
    "the front of the vocabulary": lambda x, y: (x[..., :5].reshape(-1, 5), y.where(y < 5, -100).view(-1)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows(name, reduction, leaves, labels):
    def compute(logits):
        logits, target = ROWS[name](logits, labels)
        loss = F.cross_entropy(logits, target, reduction=reduction)
        return (loss * torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).reshape(loss.shape)).sum()

    assert_same(compute, leaves)


def test_shapes_of_views_are_those_of_logits(leaves, labels):
    for change in ROWS.values():
        assert change(lazy(leaves), labels)[0].shape == change(real(leaves), labels)[0].shape


LOSSES = {
    "module": lambda x, y: torch.nn.CrossEntropyLoss(ignore_index=2)(x, y.where(y >= 0, 2)),
    "smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1, dtype=torch.float64), y, reduction="sum"),
    "two": lambda x, y: F.cross_entropy(x, y) + 0.5 * F.cross_entropy(x[1:], y[:-1]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, leaves, labels):
    assert_same(lambda x: LOSSES[name](x.view(-1, V), labels.view(-1)), leaves)


def test_entries_that_are_set_have_no_probability(leaves, labels):
    tokens = torch.tensor([1, 3])
    free = torch.where(torch.isin(labels, tokens), -100, labels).view(-1)

    def compute(logits):
        logits[:, :, tokens.tolist()] = torch.finfo(logits.dtype).min
        return F.cross_entropy(logits.view(-1, V), free)

    assert_same(compute, leaves)


def test_a_label_that_was_set_to_nothing_is_an_error(leaves, labels):
    logits = lazy(leaves)
    logits[..., [1, 3]] = float("-inf")
    with pytest.raises(FusedLossError, match="labels: 1 at flat position 0"):
        F.cross_entropy(logits.view(-1, V), labels.view(-1))
    with pytest.raises(FusedLossError, match="label smoothing"):
        F.cross_entropy(logits.view(-1, V), labels.view(-1), label_smoothing=0.1)


def test_settings_of_the_config_are_added(leaves, labels):
    from ac_loss import reference

    inputs = (leaves["hidden"], leaves["weight"], labels, leaves["bias"])
    expected = reference.linear_cross_entropy(*inputs, label_smoothing=0.1, z_loss=0.01)
    logits = lazy(leaves, label_smoothing=0.1, z_loss=0.01).view(-1, V)
    torch.testing.assert_close(F.cross_entropy(logits, labels.view(-1)), expected)
    with pytest.raises(FusedLossError, match="label_smoothing: Model smooths by 0.2 itself"):
        F.cross_entropy(logits, labels.view(-1), label_smoothing=0.2)


def test_every_label_ignored_is_zero_with_zero_gradients(leaves):
    loss = F.cross_entropy(lazy(leaves).view(-1, V), torch.full((B * S,), -100))
    assert loss == 0
    assert all(grad is None or not grad.any() for grad in gradients(loss, leaves))


UNKNOWN = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "__rtruediv__": lambda x: 1 / x,
    "mul": lambda x: x * -1,
    "mul of a tensor": lambda x: x * torch.ones(V),
    "add of logits": lambda x: x + torch.ones(B, S, V),
    "add of a number": lambda x: x + 1.0,
    "add behind a softcap": lambda x: x.tanh() + torch.ones(V),
    "tanh": lambda x: x.tanh().tanh(),
    "view": lambda x: x.view(-1),
    "reshape over the vocabulary": lambda x: x.reshape(B, V, S),
    "__getitem__": lambda x: x[..., 3],
    "__getitem__ of a list": lambda x: x[..., [1, 2]],
    "__getitem__ with a step": lambda x: x[..., ::2],
    "__setitem__": lambda x: x.__setitem__((0, 0), 0.0),
    "int": lambda x: x.to(torch.int64),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "cross_entropy of sequences": lambda x: F.cross_entropy(x, torch.zeros(B, V, dtype=torch.long)),
    "cross_entropy with weights": lambda x: F.cross_entropy(x[0], torch.zeros(S, dtype=torch.long), torch.ones(V)),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x[0], torch.ones(S, V)),
    "nll_loss": lambda x: F.nll_loss(x[0], torch.zeros(S, dtype=torch.long)),
    "as a target": lambda x: F.cross_entropy(torch.ones(B, S, V), x),
    "in place on a view": lambda x: (x.view(-1, V), x.mul_(2)),
    "written elsewhere": lambda x: torch.empty(B, S, V, dtype=x.dtype).copy_(x),
    "an ATen call": torch.ops.aten.exp,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_anything_else_is_one_clear_error(name, leaves):
    with pytest.raises(FusedLossError) as error:
        UNKNOWN[name](lazy(leaves))
    message = str(error.value)
    assert f"of the logits of Model at {__file__}:" in message
    assert "GiB (fp32, [" in message
    assert "logits.materialize()" in message
    assert "remove_fused_loss(model)" in message


def test_materialized_logits_are_the_logits_and_differentiable(leaves):
    changes = [
        *(lambda x, change=change: change(x, leaves) for change in ELEMENTWISE.values()),
        lambda x: x.transpose(1, 2),
        lambda x: x.log_softmax(-1),
    ]
    for change in changes:
        expected, got = change(real(leaves)), change(lazy(leaves)).materialize()
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected)
        pairs = zip(gradients(got.sin().sum(), leaves), gradients(expected.sin().sum(), leaves), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)


def test_detached_logits_send_no_gradients(leaves, labels):
    assert not F.cross_entropy(lazy(leaves).detach().view(-1, V), labels.view(-1)).requires_grad


def test_metadata(leaves):
    logits = lazy(leaves)
    assert isinstance(logits, torch.Tensor)
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.device) == ((B, S, V), torch.float64, torch.device("cpu"))
    assert (logits.size(-1), logits.dim(), logits.numel(), len(logits)) == (V, 3, B * S * V, B)
    assert logits.is_floating_point()
    assert not logits.requires_grad
    assert repr(logits) == "LazyLogits(shape=[2, 5, 7], dtype=torch.float64, model=Model; .materialize())"
    assert torch.ones(1).to(logits).dtype == torch.float64


def test_a_weight_that_has_changed_is_noticed(leaves, labels):
    logits = lazy(leaves)
    with torch.no_grad():
        leaves["weight"].add_(1)
    with pytest.raises(FusedLossError, match="changed"):
        logits.materialize()
    with pytest.raises(FusedLossError, match="changed"):
        F.cross_entropy(logits.view(-1, V), labels.view(-1))


def test_a_weight_that_was_freed_is_noticed(leaves):
    leaves = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    logits = lazy(leaves)
    leaves["weight"].untyped_storage().resize_(0)
    with pytest.raises(FusedLossError, match="freed"):
        logits.materialize()


def test_autocast_is_that_of_the_head(labels):
    head = torch.nn.Linear(H, V)
    hidden = torch.randn(B, S, H)
    with torch.autocast("cpu", torch.bfloat16):
        logits = lazy_linear(hidden, head.weight, head.bias, Origin("Model", LossConfig()))
        expected = F.cross_entropy(head(hidden).float().view(-1, V), labels.view(-1))
    assert logits.dtype == torch.bfloat16
    loss = F.cross_entropy(logits.view(-1, V), labels.view(-1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(loss, F.cross_entropy(head(hidden).view(-1, V), labels.view(-1)), rtol=1e-6, atol=0)
