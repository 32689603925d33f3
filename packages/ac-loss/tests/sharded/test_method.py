import copy

import pytest
import torch
from torch import nn

from ac_loss import linear_cross_entropy
from ac_loss.sharded import add_loss_method


def test_a_plain_head_gets_the_same_loss(draw):
    inputs = draw((4, 5), 31, 13)
    head = nn.Linear(13, 31).double()
    add_loss_method(head, softcap=2.0, reduction="sum")
    options = {"softcap": 2.0, "reduction": "sum", "num_label_tokens": 7}
    right = linear_cross_entropy(inputs["hidden"], head.weight, inputs["labels"], head.bias, **options)
    assert torch.equal(head.loss(inputs["hidden"], inputs["labels"], num_label_tokens=7), right)
    other = copy.deepcopy(head)
    with torch.no_grad():
        other.weight.zero_(), other.bias.zero_()
    # The copy's method is the copy's.
    loss = other.loss(inputs["hidden"], inputs["labels"], reduction="mean")
    torch.testing.assert_close(loss, torch.tensor(31.0).double().log())


def test_what_is_no_head_is_refused():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    for head in (Adapted(4, 5), nn.Embedding(5, 4)):
        with pytest.raises(TypeError, match=f"head: {type(head).__name__} is not a plain nn.Linear, .*merge an"):
            add_loss_method(head)
    with pytest.raises(ValueError, match="name: Linear has an attribute 'forward'; choose another name"):
        add_loss_method(nn.Linear(4, 5), "forward")
