import pytest
import torch

from ac_loss.backends.torch_backend import guards


class Saves(torch.autograd.Function):
    """Saves a tensor, and says in its backward what `take_saved` said of it."""

    said: list[bool]

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.full_like(x, 2.0), None)
        return x.sum()

    @staticmethod
    def backward(ctx, upstream):
        (saved, nothing), ours = guards.take_saved(ctx)
        assert nothing is None
        assert torch.equal(saved, torch.full((3,), 2.0))
        Saves.said.append(ours)
        return saved * upstream


@pytest.fixture
def said():
    Saves.said = []
    return Saves.said


def loss():
    return Saves.apply(torch.ones(3, requires_grad=True))


def test_saved_tensors_are_ours_once_the_graph_is_freed(said):
    # Fails where torch no longer has the private names that take_saved asks: gradients are then held twice.
    loss().backward()
    assert said == [True]


def test_they_are_not_while_the_graph_is_kept(said):
    kept = loss()
    kept.backward(retain_graph=True)
    kept.backward()
    assert said == [False, True]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        kept.backward()


ALIASES = {
    "same": lambda t: t,
    "detached": torch.Tensor.detach,
    "view": lambda t: t[:1],
    "storage": torch.Tensor.untyped_storage,
    "array": torch.Tensor.numpy,
    "capsule": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_they_are_not_while_a_hook_holds_them(said, alias):
    if alias is torch.Tensor.numpy:
        pytest.importorskip("numpy")
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(alias(t)) or t, lambda t: t):
        value = loss()
    value.backward()
    assert said == [False]
    held.clear()


def test_they_are_under_hooks_that_give_copies(said):
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.tolist, torch.tensor):
        value = loss()
    value.backward()
    assert said == [True]


def test_hooks_unpack_once_though_the_graph_is_kept(said):
    # Offloading gives away what it has, so that a second question would find nothing.
    packed = {}

    def pack(tensor):
        packed[len(packed)] = tensor
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.pop):
        value = loss()
    value.backward(retain_graph=True)
    assert said == [False]
    assert not packed


def test_they_are_in_a_checkpointed_region(said):
    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(Saves.apply, x, use_reentrant=False).backward()
    assert said == [True]


@pytest.mark.parametrize("gone", ["count", "clear"])
def test_without_the_private_names_nothing_is_ours(said, gone, monkeypatch):
    if gone == "count":
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
        loss().backward()
        assert said == [False]
    else:
        assert guards.take_saved(type("Context", (), {"saved_tensors": (torch.ones(1),)})())[1] is False
