"""`verify` says equal where it is, finds what is not, and leaves the model as it was."""

import json
import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    find_blocks,
    verify,
)
from ac_core.region.forward import checkpointed_forwards

IDS = torch.arange(24).reshape(2, 12) % 32
X = torch.linspace(-1, 1, 40).reshape(5, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).sin())


def blocks(kind=Block, *args):
    torch.manual_seed(0)
    return nn.Sequential(*(kind(*args) for _ in range(3)))


def in_recompute():
    return torch._C._current_graph_task_id() != -1


# -- what is equal ----------------------------------------------------------------------------------------------------


def test_dropout_without_labels(stack):
    result = verify(stack(dropout=0.1), IDS)
    assert result
    assert result.equal is True
    assert result.deterministic
    assert result.loss
    assert result.gradients.compared == len(list(stack().parameters()))
    assert result.rng.compared >= 2
    assert result.report.applied_blocks == tuple(f"layers.{i}" for i in range(4))


def test_batch_norm_counters_and_lazy_state():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("first", None)

        def forward(self, x):
            if self.first is None:
                self.first = x.detach().mean()
            return super().forward(self.norm(x)) * self.first.exp()

    result = verify(blocks(Counting), X)
    assert result.equal, str(result)
    assert result.buffers.compared == 3 * 4


def test_tied_frozen_and_unused_parameters():
    model = blocks()
    model[1].up.weight = model[0].up.weight
    model[2].down.requires_grad_(False)
    model[0].spare = nn.Linear(2, 2)
    result = verify(model, X)
    assert result.equal
    assert result.gradients.compared == 12 - 1 - 2


def test_outputs_in_containers_and_inputs_that_need_gradients():
    @dataclass
    class Output:
        hidden: Tensor
        states: tuple

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = blocks()

        def forward(self, x, *, scale):
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x * scale)
            return Output(x, tuple(states))

    scale = torch.ones((), requires_grad=True)
    result = verify(Model(), {"x": X, "scale": scale})
    assert result.equal
    assert result.loss.compared == 4
    assert result.gradients.compared == 12 + 1
    assert scale.grad is None


def test_nan_is_equal_to_nan():
    class Undefined(Block):
        def forward(self, x):
            return super().forward(x) * float("nan")

    assert verify(blocks(Undefined), X).equal


def test_with_a_loss_of_the_callers_and_a_choice_of_blocks():
    config = ActivationCheckpointingConfig(policy="full")
    result = verify(blocks(), X, config, loss=lambda y: y.square().mean(), blocks="1")
    assert result.equal
    assert result.report.applied_blocks == ("1",)


def test_what_is_applied_already():
    model = blocks()
    apply_activation_checkpointing(model)
    result = verify(model, X, None)
    assert result.equal
    assert result.report is None
    assert len(checkpointed_forwards(model)) == 3
    assert all(forward.enabled for _, forward in checkpointed_forwards(model))


def test_inside_autocast_and_no_grad(stack):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert verify(stack(), IDS).equal


def test_hugging_face_models():
    transformers = pytest.importorskip("transformers", reason="ac-core alone does not need transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    ids = IDS % 60 + 1
    assert llama.config.use_cache is True
    assert verify(llama, {"input_ids": ids, "labels": ids}).equal
    assert verify(llama.bfloat16(), {"input_ids": ids}).equal
    assert llama.config.use_cache is True
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    assert verify(t5, {"input_ids": ids, "labels": ids}).equal
    assert (t5.config.use_cache, t5.decoder.config.use_cache) == (True, True)


# -- what is not ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stateless(monkeypatch):
    """An ac-core that does not keep the state of blocks: `verify` has to notice."""
    monkeypatch.setattr("ac_core.apply.state_contexts", lambda *_: [])


@pytest.mark.usefixtures("stateless")
def test_a_block_that_draws_numbers_which_are_not_replayed():
    class Jitter(Block):
        def forward(self, x):
            return super().forward(x * (1 + random.random()))

    result = verify(blocks(Jitter), X)
    assert not result.equal
    assert result.deterministic
    assert result.loss
    assert not result.gradients
    assert result.rng.names == ("python",)


@pytest.mark.usefixtures("stateless")
def test_a_generator_of_the_blocks_own_that_is_left_elsewhere():
    class Jitter(Block):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x):
            return super().forward(x + torch.rand(8, generator=self.generator))

    result = verify(blocks(Jitter), X)
    assert result.loss
    assert not result.gradients
    assert set(result.rng.names) == {"0.generator", "1.generator", "2.generator"}


class Marked(torch.autograd.Function):
    """Does `in_backward(gradient)` in the backward if what it saved comes from a recompute."""

    @staticmethod
    def forward(ctx, x, in_backward):
        ctx.in_backward = in_backward
        ctx.save_for_backward(torch.tensor(in_recompute()))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.in_backward(gradient) if ctx.saved_tensors[0] else gradient, None


def marked(in_backward):
    class MarkedBlock(Block):
        def forward(self, x):
            return Marked.apply(super().forward(x), in_backward)

    return blocks(MarkedBlock)


def test_numbers_drawn_in_the_backward_of_a_recomputed_region_alone():
    result = verify(marked(lambda gradient: gradient + 0 * torch.rand(1)), X)
    assert result.rng.names == ("cpu",)
    assert result.gradients
    assert not result.equal


def test_batch_norm_that_is_updated_twice():
    """The norm is no submodule of the block, so nothing keeps its buffers."""

    class Borrowing(Block):
        def __init__(self, norm):
            super().__init__()
            self.borrowed = [norm]

        def forward(self, x):
            return super().forward(self.borrowed[0](x))

    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(norm, Borrowing(norm), Borrowing(norm))
    result = verify(model, X, blocks=Borrowing)
    assert result.loss
    assert result.gradients
    assert set(result.buffers.names) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert norm.num_batches_tracked == 0
    counted = next(d for d in result.buffers.differences if d.name == "0.num_batches_tracked")
    assert counted.max_abs == 2  # 5 updates, not 3


@pytest.mark.usefixtures("stateless")
def test_a_counter_that_is_counted_twice():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    result = verify(blocks(Counting), X)
    assert result.gradients
    assert result.buffers.names == ("0.calls", "1.calls", "2.calls")
    assert result.buffers.differences[0].what == "is 2 instead of 1"


def test_a_gradient_that_differs_in_the_recompute():
    result = verify(marked(lambda gradient: gradient * 2), X)
    assert result.loss
    assert result.gradients.names == tuple(n for n, _ in blocks().named_parameters())
    assert {d.name: d.max_rel for d in result.gradients.differences}["2.down.bias"] == 1.0  # twice as large
    lines = str(result).splitlines()
    assert not result
    assert lines[0].endswith("NOT equal")
    assert lines[6].startswith("  gradients: 0.up.weight differs: max abs ")
    assert lines[-1] == "  ... and 2 more"


def test_a_difference_that_appears_in_the_second_step_alone():
    backwards = []

    def in_backward(gradient):
        backwards.append(1)
        return gradient * (2 if len(backwards) > 3 else 1)  # three blocks a step

    result = verify(marked(in_backward), X)
    assert result.deterministic
    assert result.gradients.compared == 12
    assert len(result.gradients.names) == 12


def test_gradients_that_are_missing():
    result = verify(blocks(), X, blocks="1", context_fn=lambda: (torch.no_grad(), nullcontext()))
    assert result.loss
    assert {d.what for d in result.gradients.differences} == {"is missing"}
    assert set(result.gradients.names) == {n for n, _ in blocks().named_parameters() if not n.startswith("2.")}


def test_gradients_that_are_too_many():
    class Extra(Block):
        def forward(self, x):
            if in_recompute():
                self.spare.weight.grad = torch.ones(1, 1)
            return super().forward(x)

    model = blocks(Extra)
    for block in model:
        block.spare = nn.Linear(1, 1)
    result = verify(model, X)
    assert result.gradients.names == ("0.spare.weight", "1.spare.weight", "2.spare.weight")
    assert result.gradients.differences[0].what == "is there, and should not"
    assert model[0].spare.weight.grad is None


def test_a_loss_that_differs():
    class Shifting(Block):
        def forward(self, x):
            return super().forward(x) + shift[0]

    class Shift:
        def __enter__(self):
            shift[0] = 0.5

        def __exit__(self, *_):
            shift[0] = 0.0

    shift = [0.0]
    result = verify(blocks(Shifting), X, context_fn=lambda: (Shift(), Shift()))
    assert result.loss.names == ("output",)
    assert result.loss.differences[0].max_abs > 0.1


def test_a_model_that_differs_from_itself_is_no_failure_of_checkpointing():
    steps = []

    class Drifting(Block):
        def forward(self, x):
            steps.append(1)
            return super().forward(x) + len(steps)

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 8), Drifting())
    result = verify(model, X, blocks=["0", "1"])
    assert not result.deterministic
    assert not result.equal
    assert result.loss  # nothing stable to compare
    assert result.loss.compared == 0
    assert result.gradients
    assert "output" in {d.name for d in result.unstable}
    assert "no verdict, the model differs from itself" in str(result)
    assert "without checkpointing, a second time: loss: output differs" in str(result)


# -- the result -------------------------------------------------------------------------------------------------------


def test_the_table():
    lines = str(verify(blocks(), X)).splitlines()
    assert lines[0] == "with activation checkpointing against without: equal, bit for bit"
    assert [line.split() for line in lines[1:4]] == [
        ["kind", "compared", "different"],
        ["loss", "1", "0"],
        ["gradients", "12", "0"],
    ]
    assert len(lines) == 5 + 1


def test_plain_data(stack):
    data = json.loads(json.dumps(verify(stack(), IDS).to_dict(), allow_nan=False))
    assert data["equal"] is data["loss"] is data["gradients"] is data["buffers"] is data["rng"] is True
    assert data["differences"] == data["unstable"] == []

    result = verify(marked(lambda gradient: gradient * float("nan")), X)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["equal"] is data["gradients"] is False
    assert data["loss"] is True
    assert data["differences"][0]["max_abs"] == "inf"


# -- the model comes out as it went in --------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["not at all", "in the first step", "in the checkpointed step"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_out_as_it_went_in(stack, fails, training):
    class Failing(Block):
        def forward(self, x):
            if fails == "in the first step" or (fails == "in the checkpointed step" and in_recompute()):
                raise ZeroDivisionError
            return self.norm(super().forward(x))

    model = blocks(Failing)
    for block in model:
        block.norm = nn.BatchNorm1d(8)
    model.train(training)
    model[0].eval()
    model[1].up.weight.grad = gradient = torch.ones(16, 8)
    modules = [dict(module.__dict__) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with nullcontext() if fails == "not at all" else pytest.raises(ZeroDivisionError):
        assert verify(model, X).equal
    assert [dict(module.__dict__) for module in model.modules()] == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model[1].up.weight.grad is gradient
    assert gradient.eq(1).all()
    assert model[0].up.weight.grad is None


def test_the_note_says_in_which_step_it_failed():
    class Failing(Block):
        def forward(self, x):
            if in_recompute():
                raise ZeroDivisionError
            return super().forward(x)

    with pytest.raises(ZeroDivisionError) as error:
        verify(blocks(Failing), X)
    assert error.value.__notes__[-1] == (
        "raised in a step with activation checkpointing; two steps without it had gone through"
    )


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_config_for_a_model_that_is_checkpointed_already():
    model = blocks()
    apply_activation_checkpointing(model)
    with pytest.raises(ActivationCheckpointingError, match=r"verify\(model, batch, None\)"):
        verify(model, X)
    with pytest.raises(ActivationCheckpointingError, match=r"verify\(model, batch, None\)"):
        verify(model, X, None, blocks="1")


def test_no_config_for_a_model_that_is_not_checkpointed():
    with pytest.raises(ActivationCheckpointingError, match=r"config: None verifies what is applied"):
        verify(blocks(), X, None)


def test_mistakes_of_apply_are_told_as_it_does():
    with pytest.raises(ValueError, match=r"policy: 'fulll' is not one of"):
        verify(blocks(), X, "fulll")
    with pytest.raises(ActivationCheckpointingError, match="no block recognised"):
        verify(nn.Linear(8, 8), X)


def test_a_model_without_values():
    with pytest.raises(ActivationCheckpointingError, match="no values to compare"):
        verify(blocks().to("meta"), X.to("meta"))


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model: list is not a torch.nn.Module"):
        verify(find_blocks(blocks()), X)


# -- blocks that are not run ------------------------------------------------------------------------------------------


class ByAnotherMethod(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.called = called

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x) if index in self.called else type(layer).forward(layer, x)
        return x


def test_blocks_that_are_not_called_through_their_forward_are_named():
    assert verify(ByAnotherMethod({0, 1, 2}), X).idle == ()
    result = verify(ByAnotherMethod({1}), X)
    assert result.idle == ("layers.0", "layers.2")
    assert "not called in this step, or not with gradients on: layers.0, layers.2" in repr(result)
    with pytest.raises(ActivationCheckpointingError, match="none of the 3 blocks"):
        verify(ByAnotherMethod(set()), X)
