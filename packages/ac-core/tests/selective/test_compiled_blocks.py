"""Blocks compiled one by one, as large models are: one compilation serves them all, with what the policy keeps."""

import copy
import pickle

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing, remove_activation_checkpointing

DEPTH = 10  # above torch._dynamo.config.recompile_limit


class Backend:
    """Runs what it is given as it is, and notes the matmuls of each backward graph."""

    def __init__(self) -> None:
        self.backwards: list[int] = []
        self.compile = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            bw_compiler=self._backward,
            partition_fn=min_cut_rematerialization_partition,
        )

    def _backward(self, graph, _):
        self.backwards.append(sum(str(node.target).startswith(("aten.mm", "aten.addmm")) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


def test_one_graph_for_all_blocks_with_less_recompute_than_full(stack, assert_same_step, train_step, backend):
    matmuls = {}
    for policy in ("none", "full", "selective"):
        model = stack(depth=DEPTH)
        apply_activation_checkpointing(model, policy)
        for layer in model.layers:
            layer.compile(backend=backend.compile)
        assert_same_step(model, stack(depth=DEPTH))
        (matmuls[policy],) = backend.backwards
        backend.backwards.clear()
        torch._dynamo.reset()
    # Four products give the gradients. The recompute of `full` adds the first of the forward; `selective` keeps it.
    assert matmuls == {"none": 4, "full": 5, "selective": 4}


def test_a_forward_that_is_compiled_already_is_refused_and_named(stack, backend):
    model = stack()
    model.layers[2].forward = torch.compile(model.layers[2].forward, backend=backend.compile)
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.2' is compiled already.*compile whole blocks"):
        apply_activation_checkpointing(model, "selective")
    assert "forward" not in model.layers[0].__dict__  # nothing was changed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_their_own_weights(stack, assert_same_step, train_step, copied):
    model = stack()
    apply_activation_checkpointing(model, "selective")
    train_step(model)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_step(twin, stack())
    remove_activation_checkpointing(twin)
    assert not any("forward" in module.__dict__ for module in twin.modules())
    assert_same_step(twin, stack())
