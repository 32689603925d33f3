"""Applied checkpointing recomputes, keeps every number, changes nothing else, and comes off again."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ac_core
from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    remove_activation_checkpointing,
)

WIDTH, TOKENS, FP32 = 16, 24, 4


def test_full_runs_each_block_twice_and_gives_the_same_numbers(stack, assert_same_step, train_step, count_forwards):
    model = stack(depth=4)
    apply_activation_checkpointing(model, "full")
    assert_same_step(stack(depth=4), model)
    calls = count_forwards(model.layers[2].up)
    train_step(model)
    assert calls() == 2


def test_full_keeps_one_boundary_tensor_a_block(stack, saved_bytes):
    def per_block(policy):
        deep, shallow = stack(depth=6), stack(depth=2)
        for model in (deep, shallow):
            apply_activation_checkpointing(model, policy)
        return (saved_bytes(deep) - saved_bytes(shallow)) / 4

    boundary = TOKENS * WIDTH * FP32
    bookkeeping = 8192  # the RNG state that every region keeps
    assert boundary <= per_block("full") <= boundary + bookkeeping
    assert per_block("none") > 5 * boundary


def test_dropout_draws_the_same_mask(stack, assert_same_step):
    model = stack(dropout=0.5)
    apply_activation_checkpointing(model)
    assert_same_step(stack(dropout=0.5), model)


def test_a_block_that_draws_random_numbers_needs_its_rng(stack, assert_same_step):
    config = ActivationCheckpointingConfig(preserve_rng_state=False)
    noisy = stack(dropout=0.5).eval()
    apply_activation_checkpointing(noisy, config)
    noisy(torch.arange(6))
    with pytest.raises(ActivationCheckpointingError, match=r"block 'layers\.0' draws random numbers"):
        noisy.train()(torch.arange(6))
    model = stack(dropout=0.0)
    apply_activation_checkpointing(model, config)
    assert_same_step(stack(), model)


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_changes_no_number(stack, assert_same_step, early_stop):
    model = stack()
    apply_activation_checkpointing(model, ActivationCheckpointingConfig(early_stop=early_stop))
    assert_same_step(stack(), model)


def test_two_backwards_over_a_retained_graph(stack):
    model, plain = stack(dropout=0.3), stack(dropout=0.3)
    apply_activation_checkpointing(model)
    ids = torch.arange(12)
    for m in (model, plain):
        torch.manual_seed(3)
        loss = m(ids).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_follows_grad_mode_and_not_training(stack, count_forwards):
    model = stack()
    apply_activation_checkpointing(model)
    calls = count_forwards(model.layers[0].up)
    with torch.no_grad():
        model(torch.arange(6))
    assert calls() == 1
    model.eval()(torch.arange(6)).sum().backward()
    assert calls() == 3


def test_nothing_but_the_forward_changes(stack):
    model, plain = stack(), stack()
    apply_activation_checkpointing(model)

    def surface(m):
        return (
            list(m.state_dict()),
            [n for n, _ in m.named_parameters()],
            [(n, type(x)) for n, x in m.named_modules()],
        )

    assert surface(model) == surface(plain)
    plain.load_state_dict(model.state_dict())
    remove_activation_checkpointing(model)
    assert surface(model) == surface(plain)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("saved_with", [True, False], ids=["saved with, loaded without", "saved without, loaded with"])
def test_a_run_is_saved_with_checkpointing_and_goes_on_without_or_the_reverse(stack, train_step, saved_with):
    def train(model, steps, state=None):
        optimizer = torch.optim.AdamW(model.parameters())
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for _ in range(steps):
            train_step(model)
            optimizer.step()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    first, second = stack(), stack()
    apply_activation_checkpointing(first if saved_with else second)
    weights, moments = train(second, 1, train(first, 1))
    straight_weights, straight_moments = train(stack(), 2)
    assert weights.keys() == straight_weights.keys()
    assert all(torch.equal(weights[name], straight_weights[name]) for name in weights)
    assert moments["param_groups"] == straight_moments["param_groups"]
    assert all(
        torch.equal(moments["state"][i][key], straight_moments["state"][i][key])
        for i in straight_moments["state"]
        for key in ("step", "exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_computes_with_its_own_weights(stack, assert_same_step, duplicate):
    model = stack()
    apply_activation_checkpointing(model)
    twin = duplicate(model)
    assert_same_step(model, twin)
    reference = stack()
    with torch.no_grad():
        for m in (twin, reference):
            for p in m.parameters():
                p.mul_(1.5)
    assert_same_step(twin, reference)
    remove_activation_checkpointing(twin)
    assert "forward" not in vars(twin.layers[0])
    assert "forward" in vars(model.layers[0])


def test_an_instance_forward_of_another_tool_is_kept(stack, assert_same_step):
    model, plain = stack(), stack()
    for m in (model, plain):
        layer = m.layers[1]
        layer.forward = lambda x, scale=None, layer=layer: 2 * type(layer).forward(layer, x, scale=scale)
    theirs = model.layers[1].forward
    apply_activation_checkpointing(model)
    assert_same_step(model, plain)
    remove_activation_checkpointing(model)
    assert model.layers[1].forward is theirs


def test_positional_and_keyword_tensors_get_gradients(stack):
    model = stack(depth=2)
    block = model.layers[0]
    apply_activation_checkpointing(model)
    x, scale = torch.randn(3, 16, requires_grad=True), torch.randn((), requires_grad=True)
    block(x, scale=scale).sum().backward()
    assert x.grad.abs().sum() > 0
    assert scale.grad != 0


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_around_it_recomputes_and_gives_the_same_numbers(stack, train_step, assert_same_step, compiled_first):
    model = stack()
    if compiled_first:
        model.compile(backend="aot_eager")
    apply_activation_checkpointing(model)
    if not compiled_first:
        model.compile(backend="aot_eager")
    assert_same_step(model, stack())


def test_a_parameter_edited_between_forward_and_backward_is_an_error(stack):
    model = stack()
    apply_activation_checkpointing(model)
    loss = model(torch.arange(6)).sum()
    with torch.no_grad():
        model.layers[1].up.weight.add_(1)
    with pytest.raises(ActivationCheckpointingError, match=r"'up\.weight' of block 'layers\.1' was modified in place"):
        loss.backward()


def test_functional_call_is_an_error_and_not_a_wrong_gradient(stack):
    model = stack()
    apply_activation_checkpointing(model)
    values = {n: (p.detach() * 1.1).requires_grad_() for n, p in model.named_parameters()}
    out = torch.func.functional_call(model, values, (torch.arange(6),)).sum()
    with pytest.raises(ActivationCheckpointingError, match="is another tensor since the forward"):
        torch.autograd.grad(out, list(values.values()))


def test_blocks_shared_by_two_lists_are_checkpointed_once(stack, assert_same_step):
    def tied():
        model = stack(depth=2)
        model.again = nn.ModuleList(model.layers)
        return model

    model = tied()
    report = apply_activation_checkpointing(model)
    assert report.applied_blocks == ("layers.0", "layers.1")
    assert_same_step(model, tied())
    remove_activation_checkpointing(model)
    assert "forward" not in vars(model.layers[0])


def test_a_context_fn_that_is_none_is_refused_and_nothing_changed(stack):
    model = stack()
    with pytest.raises(TypeError, match=r"context_fn: .* is not callable"):
        apply_activation_checkpointing(model, context_fn=[5])
    assert "forward" not in vars(model.layers[0])


def test_an_input_edited_in_place_is_an_error_and_not_a_wrong_gradient(stack):
    model = stack(depth=2)
    apply_activation_checkpointing(model)
    scale = torch.ones(())
    out = model.layers[0](torch.randn(3, 16), scale=scale)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_model_without_blocks_is_an_error(stack):
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ActivationCheckpointingError, match="no block recognised in this Sequential.*blocks="):
        apply_activation_checkpointing(flat)
    with pytest.raises(ActivationCheckpointingError, match=r"candidates: encoder\.\* \(2 x Linear\)"):
        apply_activation_checkpointing(nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}))
    with pytest.raises(ActivationCheckpointingError, match="blocks= matches no module"):
        apply_activation_checkpointing(stack(), blocks="nothing.*")


def test_strict_off_warns_and_says_what_was_applied():
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="no block recognised"):
        report = apply_activation_checkpointing(flat, ActivationCheckpointingConfig(strict=False))
    assert report.applied_blocks == ()


def test_a_second_apply_is_refused_and_nothing_is_changed(stack, assert_same_step):
    model = stack()
    apply_activation_checkpointing(model)
    with pytest.raises(ActivationCheckpointingError, match="remove_activation_checkpointing"):
        apply_activation_checkpointing(model)
    assert_same_step(model, stack())


def test_a_refusal_leaves_the_model_as_it_was(stack):
    model = stack()
    with pytest.raises(ActivationCheckpointingError, match=r"'audio' holds no block.*\['language'\]"):
        apply_activation_checkpointing(model, scope="audio")
    assert all("forward" not in vars(module) for module in model.modules())
    assert "_ac_core_applied" not in vars(model)


def test_scope_and_policy_beside_a_config_are_refused(stack):
    with pytest.raises(ValueError, match="^scope: "):
        apply_activation_checkpointing(stack(), ActivationCheckpointingConfig(), scope="language")


def test_off_stays_off_and_says_off(stack, train_step, count_forwards):
    model = stack()
    report = apply_activation_checkpointing(model, False)
    assert report.applied_blocks == ()
    assert str(report).startswith("activation checkpointing: asked none (scope all) -> applied to 0 of 4 blocks")
    calls = count_forwards(model.layers[0].up)
    train_step(model)
    assert calls() == 1


def test_torchs_own_wrapper_is_not_checkpointed_twice(stack):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = stack()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.1' is already checkpointed by torch's"):
        apply_activation_checkpointing(model)
    with pytest.raises(ActivationCheckpointingError, match="asked for no checkpointing, but 'layers.1'"):
        apply_activation_checkpointing(model, "none")


def test_frozen_towers_are_left_out_with_a_reason():
    from torch.nn import ModuleDict

    def tower():
        return nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))

    model = ModuleDict(
        {"vision_tower": ModuleDict({"layers": tower()}), "language_model": ModuleDict({"layers": tower()})}
    )
    model["vision_tower"].requires_grad_(False)
    report = apply_activation_checkpointing(model)
    assert report.applied_blocks == ("language_model.layers.0", "language_model.layers.1")
    left_out = next(group for group in report.groups if group.part == "vision")
    assert left_out.applied == "none"
    assert left_out.reason.startswith("frozen: nothing in this part so far needs a gradient, so it saves nothing")


def test_a_frozen_tower_behind_a_trainable_embedding_is_checkpointed():
    def tower():
        layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        return nn.ModuleDict({"embed": nn.Linear(4, 8), "layers": layers})

    model = nn.ModuleDict({"vision_tower": tower(), "language_model": tower()})
    model["vision_tower"]["layers"].requires_grad_(False)
    assert len(apply_activation_checkpointing(model).applied_blocks) == 4


def test_two_ways_of_scoping():
    def tower():
        return nn.ModuleDict({"layers": nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))})

    def applied(scope):
        model = nn.ModuleDict({name: tower() for name in ("vision_tower", "audio_tower", "language_model")})
        report = apply_activation_checkpointing(model, scope=scope)
        return {name.partition("_")[0] for name in report.applied_blocks}

    assert applied("all") == {"vision", "audio", "language"}
    assert applied("multimodal") == {"vision", "audio"}
    assert applied(["language", "vision"]) == {"vision", "language"}
    assert applied("audio") == {"audio"}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (["layers.0", "layrs.1"], "'layrs.1' matches no module; near: 'layers.1'"),
        ("layers", r"'layers' matches a list of modules, which is never called itself; use 'layers\.\*'"),
    ],
)
def test_a_choice_of_blocks_is_not_dropped_in_part(stack, blocks, message):
    with pytest.raises(ac_core.ActivationCheckpointingError, match=message):
        ac_core.apply_activation_checkpointing(stack(), blocks=blocks)


def test_a_strategys_config_can_be_applied(stack):
    config = ac_core.FSDP2Config(activation_checkpointing="selective", activation_checkpointing_scope=["language"])
    report = ac_core.apply_activation_checkpointing(stack(), config)
    assert (report.policy, report.scope) == ("selective", ("language",))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_two_blocks_in_one_region_give_exact_gradients(stack, train_step, policy):
    def paired():
        model = stack(depth=6)
        model.layers = nn.ModuleList(Pair(*model.layers[i : i + 2]) for i in range(0, 6, 2))
        return model

    model = paired()
    report = ac_core.apply_activation_checkpointing(model, policy, blocks="layers.*")
    assert report.applied_blocks == ("layers.0", "layers.1", "layers.2")
    _, expected = train_step(paired())
    for _ in range(3):
        _, grads = train_step(model)
        assert [name for name in expected if not torch.equal(grads[name], expected[name])] == []


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, *, scale=None):
        return self.second(self.first(x, scale=scale), scale=scale)
