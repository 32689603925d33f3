import copy
from contextlib import ExitStack
from threading import Thread

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ac_core.estimation.conversions import conversions_of_fakes
from ac_core.estimation.fake import KnownValues, fake_mode


def test_a_module_of_fake_tensors_is_converted_and_its_ties_stay(decoder):
    with fake_mode(), KnownValues(), conversions_of_fakes():
        model = decoder(tied=True)
        model.register_buffer("scale", torch.ones(3))
        assert model.to("cpu", torch.bfloat16) is model
        tensors = [*model.parameters(), model.scale]
        assert {(type(t.data), t.dtype) for t in tensors} == {(FakeTensor, torch.bfloat16)}
        assert model.lm_head.weight is model.embed.weight
        assert isinstance(model.lm_head.weight, nn.Parameter)
        assert model.to("meta").lm_head.weight.is_meta


def test_torch_still_needs_it_and_real_modules_go_their_way():
    with fake_mode(), KnownValues():
        model = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            model.to("cpu")
    with conversions_of_fakes():
        assert nn.Linear(2, 2).half().weight.dtype is torch.half
    assert nn.Module._apply.__module__ == "torch.nn.modules.module"


def test_it_is_undone_once_the_last_has_left_in_any_order_and_after_an_error():
    original = nn.Module._apply
    first, second = ExitStack(), ExitStack()
    for step, replaced in (
        (lambda: first.enter_context(conversions_of_fakes()), True),
        (lambda: second.enter_context(conversions_of_fakes()), True),
        (first.close, True),
        (second.close, False),
    ):
        thread = Thread(target=step)
        thread.start()
        thread.join()
        assert (nn.Module._apply is not original) == replaced
    with pytest.raises(KeyError), conversions_of_fakes():
        raise KeyError
    assert nn.Module._apply is original


def test_a_copy_is_of_the_same_mode_and_keeps_ties():
    with fake_mode() as mode, KnownValues(), conversions_of_fakes():
        layer = nn.Linear(4, 4)
        layer.same, layer.table = layer.weight, torch.ones(3)
        layer.bias.requires_grad_(False)
        copied = copy.deepcopy(layer)
        assert copied.same is copied.weight is not layer.weight
        assert (copied.weight.requires_grad, copied.bias.requires_grad) == (True, False)
        assert {type(tensor.data) for tensor in copied.parameters()} == {FakeTensor}
        assert all(isinstance(tensor, nn.Parameter) for tensor in copied.parameters())
        assert copied.table.fake_mode is copied.weight.fake_mode is mode
        with pytest.raises(RuntimeError, match="created explicitly by the user"):
            copy.deepcopy(layer.weight * 2)
    assert "__deepcopy__" not in vars(FakeTensor)
