"""The fast walk finds what torch's own finds."""

import torch
from torch import nn

from ac_core.region.layout import Layout, modules_of


def block():
    shared = nn.Linear(2, 2)
    inner = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.BatchNorm1d(2)})
    inner.register_module("none", None)
    return nn.ModuleList([inner, shared])


def test_every_module_parameter_and_buffer_is_found():
    module = block()
    layout = Layout(modules_of(module))
    assert set(layout.modules) == set(module.modules())
    parameters = {id(p) for holder in layout.parameters for p in holder.values() if p is not None}
    assert parameters == {id(p) for p in module.parameters()}
    buffers = {id(b) for holder in layout.buffers for b in holder.values()}
    assert buffers == {id(b) for b in module.buffers()}


def test_it_serves_until_a_module_or_a_first_parameter_comes():
    module = block()
    layout = Layout(modules_of(module))
    assert layout.serves(modules_of(module))
    module[0]["a"][1].register_parameter("p", nn.Parameter(torch.ones(1)))
    assert not layout.serves(modules_of(module))
    layout = Layout(modules_of(module))
    module[0]["a"][1] = nn.GELU()
    assert not layout.serves(modules_of(module))


def test_places_are_named_from_the_block_down():
    module = block()
    layout = Layout(modules_of(module))
    norm = module[0]["b"]
    assert layout.place(norm._buffers, "running_mean") == "0.b.running_mean"
    assert layout.place(norm.__dict__, "eps") == "0.b.eps"


def test_a_scripted_module_is_passed_over():
    scripted = torch.jit.script(nn.Linear(2, 2))
    layout = Layout(modules_of(nn.ModuleList([scripted])))
    assert layout.modules[1] is scripted
    assert layout.parameters == []
