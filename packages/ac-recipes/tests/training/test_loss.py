"""The loss in the head equals the loss from logits, and a model whose logits are more than the head's is refused."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ac_loss import LossConfig
from ac_recipes.cli import main
from ac_recipes.errors import RunError, UsageError
from ac_recipes.training.loss import attach_loss
from ac_recipes.training.preflight import preflight

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}


def build(model_type="llama", **fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **fields))


@pytest.mark.parametrize("kind", ["fused", "plain"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_and_its_gradients_are_those_from_logits(kind, tied):
    ids = torch.randint(0, 97, (2, 9))
    labels = ids.roll(-1, 1)
    labels[0, :4] = -100
    plain, model = build(tie_word_embeddings=tied), build(tie_word_embeddings=tied)
    logits = plain(input_ids=ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100
    expected.backward()
    head_loss = attach_loss(model, LossConfig(kind=kind))
    with head_loss.labels(labels, 100):
        loss = model(input_ids=ids).logits
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_a_logit_scale_reaches_the_loss(kind):
    ids = torch.randint(0, 97, (2, 9))
    model = build()
    right = F.cross_entropy(0.25 * model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
    with attach_loss(model, LossConfig(kind=kind, logit_scale=0.25)).labels(ids, ids.numel()):
        torch.testing.assert_close(model(input_ids=ids).logits, right)


@pytest.mark.parametrize("backend", ["liger", "cce"])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_done(tiny, backend, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    recipe = tiny(f"loss_fn={{kind: fused, backend: {backend}, grad_mode: recompute}}")
    for refuse in (lambda: preflight(recipe, 1), lambda: attach_loss(build(), recipe.loss_fn)):
        with pytest.raises(UsageError) as told:
            refuse()
        text = str(told.value)
        assert text.startswith(f"loss_fn.backend: '{backend}' cannot compute this loss: ")
        assert "not installed: pip install 'ac-loss[" in text
        assert "use loss_fn.grad_mode: auto, or" in text
        assert text.endswith("; or set loss_fn.backend: auto")
        assert "\n" not in text


@pytest.mark.parametrize("verb", ["train", "verify", "compare", "estimate"])
def test_every_verb_that_computes_a_loss_refuses_it(tiny_file, verb, capsys):
    arguments = ["--device", "cpu"] * (verb == "estimate")
    setting = ["--model.dtype", "bfloat16", "--loss_fn", "{backend: native}"]
    assert main([verb, str(tiny_file), *arguments, *setting]) == 2
    assert "loss_fn.backend: 'native' cannot compute this loss" in capsys.readouterr().err


def test_without_labels_there_are_logits():
    model = build()
    ids = torch.randint(0, 97, (2, 9))
    expected = model(input_ids=ids).logits
    attach_loss(model, LossConfig())
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert "lm_head.forward" not in model.state_dict()


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 2.0}),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(model_type, fields):
    with pytest.raises(UsageError, match="changes the output of its head"):
        attach_loss(build(model_type, **fields), LossConfig())


def test_a_model_that_sees_the_token_it_is_to_predict_is_refused():
    with pytest.raises(UsageError, match="sees the token that it is to predict"):
        attach_loss(build("bert"), LossConfig())
    attach_loss(build("bert", is_decoder=True), LossConfig())


def test_a_model_that_does_not_run_is_told_with_what_was_tried():
    model = build()
    model.model.norm = torch.nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"^model\.config: .* two texts of four tokens, and it stopped with Runtime"):
        attach_loss(model, LossConfig())


def test_a_head_with_a_forward_of_its_own_is_refused():
    class ScaledHead(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build(tie_word_embeddings=False)
    model.lm_head.__class__ = ScaledHead
    with pytest.raises(UsageError, match=r"no plain nn\.Linear"):
        attach_loss(model, LossConfig())


def test_main_grad_is_refused():
    with pytest.raises(UsageError, match=r"loss_fn\.accum: 'main_grad' is for parameters whose owner"):
        attach_loss(build(), LossConfig(accum="main_grad"))


def test_the_auxiliary_loss_of_a_model_is_weighted_as_the_model_weights_it():
    sizes = {"num_key_value_heads": 4, "num_local_experts": 4, "output_router_logits": True}
    model = build("mixtral", **sizes, router_aux_loss_coef=0.3)
    ids = torch.randint(0, 97, (2, 9))
    expected = model(input_ids=ids, labels=ids).loss
    head_loss = attach_loss(model, LossConfig())
    with head_loss.labels(F.pad(ids[:, 1:], (0, 1), value=-100), 16):
        output = model(input_ids=ids)
    assert head_loss.auxiliary_coefficient == 0.3
    torch.testing.assert_close(output.logits + 0.3 * output.aux_loss, expected)
    without = build("mixtral", **sizes | {"output_router_logits": False})
    assert attach_loss(without, LossConfig()).auxiliary_coefficient == 0


def test_an_auxiliary_loss_that_the_configuration_does_not_tell_is_refused():
    model = build("mixtral", num_key_value_heads=4, num_local_experts=4, output_router_logits=True)
    model.router_aux_loss_coef = 1.0  # and the configuration says 0.001
    with pytest.raises(UsageError, match="has an auxiliary loss, and how it is added cannot be told"):
        attach_loss(model, LossConfig())


def test_the_probe_changes_neither_mode_nor_random_numbers():
    model = build().train()
    state = torch.get_rng_state()
    attach_loss(model, LossConfig())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_head_that_is_not_called_is_an_error():
    model = build()
    head_loss = attach_loss(model, LossConfig())
    with pytest.raises(RunError, match="0 times"), head_loss.labels(torch.zeros(1, 2, dtype=torch.long), 1):
        model.model(input_ids=torch.zeros(1, 2, dtype=torch.long))
