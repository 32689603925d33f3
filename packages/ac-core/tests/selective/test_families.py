import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ac_core.selective.families import kind_of, matmul_leaf
from ac_core.selective.ops import check_op_name


@pytest.mark.parametrize(
    ("function", "family"),
    [
        (F.linear, "matmul"),
        (torch.matmul, "matmul"),
        (torch.Tensor.__matmul__, "matmul"),
        (torch.addmm, "matmul"),
        (F.scaled_dot_product_attention, "attention"),
        (F.multi_head_attention_forward, "attention"),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, "attention"),
        (torch.ops.aten.mm.default, "matmul"),
        (torch.ops._c10d_functional.all_reduce, "collective"),
        (torch.topk, "router"),
        (torch.Tensor.topk, "router"),
        (F.silu, ""),
        (torch.Tensor.add, ""),
    ],
)
def test_the_family_of_a_call(function, family):
    assert kind_of(function).family == family


def test_every_op_of_the_families_exists():
    for function in (F.linear, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, F.scaled_dot_product_attention):
        assert [op for op in kind_of(function).ops if check_op_name(op, imported=True)] == []


def test_leaf_matmuls():
    class Conv1D(nn.Module):  # as transformers has it
        def __init__(self):
            super().__init__()
            self.nf, self.weight, self.bias = 6, nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(6))

    leaf = matmul_leaf(nn.Linear(4, 6))
    assert (leaf.inner, leaf.features) == (4, 6)
    leaf = matmul_leaf(Conv1D())
    assert (leaf.inner, leaf.features) == (4, 6)
    for other in (nn.Embedding(4, 6), nn.LayerNorm(4), nn.Conv2d(1, 1, 1), nn.Sequential(nn.Linear(4, 4)), nn.ReLU()):
        assert matmul_leaf(other) is None


def test_op_names():
    assert check_op_name("aten::mm", imported=False) is None
    assert check_op_name("aten::add.Tensor", imported=False) is None
    assert "near matches: 'aten::addmm'" in check_op_name("aten::adddmm", imported=False)
    assert "did you mean 'aten'" in check_op_name("atem::mm", imported=False)
    assert check_op_name("flash_attn_of_tomorrow::forward", imported=False) is None
    assert "import the library" in check_op_name("flash_attn_of_tomorrow::forward", imported=True)
