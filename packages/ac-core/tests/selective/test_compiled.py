import pytest
import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

import ac_core
from ac_core import ActivationCheckpointingError

BACKEND = "aot_eager"


def after(model, apply):
    apply(model)
    for layer in model.layers:
        layer.compile(backend=BACKEND)


def wrapped_after(model, apply):
    apply(model)
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=BACKEND)


def before(model, apply):
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    apply(model)


def whole(model, apply):
    apply(model)
    model.compile(backend=BACKEND)


@pytest.mark.parametrize("order", [after, wrapped_after, before, whole])
def test_the_compiler_keeps_what_the_policy_says(decoder, train_step, saved_bytes, order):
    torch._dynamo.reset()
    expected = train_step(decoder())
    saved = {}
    for policy in ("none", "full", "selective"):
        model = decoder()
        order(model, lambda m, policy=policy: ac_core.apply_activation_checkpointing(m, policy))
        loss, grads = train_step(model)
        torch.testing.assert_close(loss, expected[0])
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[1][name.replace("._orig_mod", "")])
        saved[policy] = saved_bytes(model)
    assert saved["full"] < saved["selective"] < saved["none"]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_compiled_block_is_one_graph_with_its_region_in_it(decoder, policy):
    torch._dynamo.reset()
    regions = []

    def backend(graph, _inputs):
        regions.append(["activation_checkpoint" in str(node.target) for node in graph.graph.nodes].count(True))
        return graph

    model = decoder()
    ac_core.apply_activation_checkpointing(model, policy)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert regions
    assert set(regions) == {1}


def compiled_forward(model):
    model.layers[1].forward = torch.compile(model.layers[1].forward, backend=BACKEND)
    return "layers.1"


def compiled_inside(model):
    model.layers[1].mlp.compile(backend=BACKEND)
    return "layers.1.mlp"


@pytest.mark.parametrize("compile_part", [compiled_forward, compiled_inside])
def test_a_compiled_forward_inside_of_the_region_is_refused(decoder, compile_part):
    model = decoder()
    name = compile_part(model)
    with pytest.raises(ActivationCheckpointingError, match=f"'{name}' is compiled already.*compile whole blocks"):
        ac_core.apply_activation_checkpointing(model, "selective")


def test_module_names_do_not_reach_the_compiler(decoder, selective):
    torch._dynamo.reset()
    model = selective(decoder(), ("mlp.gate",))
    model.layers[0].compile(backend=BACKEND)
    with pytest.raises(Exception, match="names modules, which torch.compile does not see"):
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("order", [after, whole])
def test_a_context_function_of_the_callers_beside_it_is_refused(decoder, order):
    torch._dynamo.reset()
    model = decoder()
    order(model, lambda m: ac_core.apply_activation_checkpointing(m, "selective", context_fn=noop_context_fn))
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.0' is compiled.*several context functions"):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_compile_of_a_block_with_running_statistics(train_step):
    torch._dynamo.reset()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(12)

        def forward(self, x):
            return x + self.norm(self.lin(x).relu())

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32))

    plain, model = build(), build()
    ac_core.apply_activation_checkpointing(model, "full", blocks=Block)
    for block in (model[1], model[2]):
        block.compile(backend=BACKEND)
    train_step(plain)
    train_step(model)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_a_module_inside_of_a_block_that_is_compiled_later(decoder, train_step):
    torch._dynamo.reset()
    _, expected = train_step(decoder())
    model = decoder()
    ac_core.apply_activation_checkpointing(model, "selective")
    model.layers[1].mlp.compile(backend=BACKEND)
    model.layers[2].attention.compile(backend=BACKEND)
    for _ in range(3):
        _, grads = train_step(model)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name])
