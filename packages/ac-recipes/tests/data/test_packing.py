"""A packed row is its examples, one beside the other: no more, no less."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ac_core import apply_activation_checkpointing
from ac_loss import LossConfig
from ac_recipes.data.encode import Encoded
from ac_recipes.data.examples import Padded, Shifted
from ac_recipes.data.packing import Packed, check_packing, pack
from ac_recipes.errors import UsageError
from ac_recipes.training.loss import attach_loss

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(model_type, attention="sdpa", **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def examples(lengths):
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in lengths:
        ids = torch.randint(3, 64, (length,), generator=generator).tolist()
        counted = (torch.rand(length, generator=generator) < 0.7).tolist()
        made.append(Shifted.of(Encoded(ids, counted), -100))
    return made


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60), size=st.integers(16, 40))
def test_every_example_is_in_one_row_and_rows_are_few(lengths, size):
    rows = pack(lengths, size)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= size for row in rows)
    fewest = -(-sum(lengths) // size)
    assert len(rows) <= 2 * fewest, "no two rows of a best fit could share one"


def test_a_row():
    one, two, three = examples([4, 3, 5])
    packed = Packed.of([one, two, three], size=8, pad_id=0, ignore_index=-100)
    assert packed.rows == [[2, 0], [1]]
    assert packed.fill == 9 / 16
    batch = packed[torch.tensor([0, 1])]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert torch.equal(batch["input_ids"][0], torch.cat([three.inputs, one.inputs, torch.zeros(1, dtype=torch.int64)]))
    assert torch.equal(batch["labels"][0, :7], torch.cat([three.labels, one.labels]))
    assert batch["labels"][0, 7:].tolist() == [-100]
    assert batch["labels"][1, 2:].tolist() == [-100] * 6


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_loss_of_a_packed_batch_is_the_sum_of_the_losses_of_its_examples(model_type, attention, policy):
    model = build(model_type, attention, **SIZES)
    check_packing(model)
    data = examples([9, 2, 14, 6, 11, 5, 17, 3])
    packed = Packed.of(data, size=24, pad_id=0, ignore_index=-100)
    assert 1 < len(packed) < len(data)
    alone = copy.deepcopy(model)
    single, single_gradients = total_loss(alone, Padded(examples=data, pad_id=0, ignore_index=-100), size=1)
    apply_activation_checkpointing(model, policy)
    together, gradients = total_loss(model, packed, size=len(packed))
    assert together == pytest.approx(single, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, single_gradients[name], rtol=1e-4, atol=1e-5)


def total_loss(model, data, size):
    """The loss summed over everything, `size` rows a batch, and the gradients of it."""
    head_loss, total = attach_loss(model, LossConfig()), 0.0
    for ids in torch.arange(len(data)).split(size):
        batch = data[ids]
        with head_loss.labels(batch.pop("labels"), 1):
            loss = model(**batch, use_cache=False).logits
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_padding_changes_no_loss():
    model = build("llama", **SIZES)
    data = examples([9, 2, 14, 6])
    single, _ = total_loss(copy.deepcopy(model), Padded(examples=data, pad_id=0, ignore_index=-100), size=1)
    for pad_to in (None, 20):
        padded = Padded(examples=data, pad_id=0, ignore_index=-100, pad_to=pad_to)
        assert padded[torch.arange(4)]["input_ids"].shape == (4, pad_to or 13)
        assert total_loss(copy.deepcopy(model), padded, size=4)[0] == pytest.approx(single, rel=1e-6)


def test_a_model_in_which_examples_see_each_other_is_refused():
    mamba = build("mamba", "eager", vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UsageError, match="packed_sequence: "):
        check_packing(mamba)
    llama = build("llama", **SIZES)
    forward = llama.model.forward

    def forget_positions(*args, position_ids=None, **rest):
        return forward(*args, **rest)

    llama.model.forward = forget_positions
    with pytest.raises(UsageError, match="in LlamaForCausalLM one example of a packed row sees another"):
        check_packing(llama)
