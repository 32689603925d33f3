"""Putting the fused loss on and taking it off, and what else happens to models meanwhile."""

import copy
import io
import pickle
import threading
import types
import warnings

import pytest
import torch
from torch import nn

import ac_loss
from ac_loss import LossConfig
from ac_loss.huggingface import FusedLossError, LazyLogits, remove_fused_loss, use_fused_loss


@pytest.fixture
def llama(build):
    return build("LlamaForCausalLM")


def signature(model):
    return (
        type(model),
        [name for name, _ in model.named_modules()],
        list(model.state_dict()),
        [name for name, _ in model.named_buffers()],
        len(model._forward_hooks) + len(model._forward_pre_hooks),
    )


def test_nothing_but_the_forward_changes(llama):
    before, attributes = signature(llama), set(vars(llama))
    use_fused_loss(llama)
    assert signature(llama) == before
    assert set(vars(llama)) - attributes == {"forward"}
    remove_fused_loss(llama)
    assert set(vars(llama)) == attributes
    remove_fused_loss(llama)  # there is nothing to undo


def test_nothing_stays_on_the_head_after_a_forward(llama, text, step):
    use_fused_loss(llama)
    before = set(vars(llama.lm_head))
    step(llama, text(llama))
    llama.lm_head.weight.data = llama.lm_head.weight.data[:, :3]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(llama, text(llama))
    assert set(vars(llama.lm_head)) == before


def test_the_report(build):
    report = use_fused_loss(build("LlamaForCausalLM"))
    assert str(report) == (
        "fused loss on LlamaForCausalLM: head lm_head (Linear), weight [151, 32], no bias\n"
        "  training with labels    fused, backend auto, accum fp32; outputs.logits is lazy\n"
        "  training without labels logits in full, with a warning\n"
        "  eval, no_grad, generate logits in full"
    )
    report = use_fused_loss(build("Gemma2ForCausalLM", final_logit_softcapping=3.0), LossConfig(accum="param"))
    assert "tied to the input embeddings, softcap 3" in str(report)
    assert report.to_dict()["accum"] == "param"
    assert use_fused_loss(build("CohereForCausalLM", logit_scale=0.25)).logit_scale == 0.25
    assert use_fused_loss(build("GraniteForCausalLM", logits_scaling=4.0)).logit_scale == 0.25
    assert use_fused_loss(build("PhiForCausalLM")).bias
    assert use_fused_loss(build("BertLMHeadModel")).heads == ("cls.predictions.decoder",)


def test_twice_is_once(llama, text, step):
    report = use_fused_loss(llama)
    assert use_fused_loss(llama, LossConfig()) == report
    with pytest.raises(ValueError, match="call remove_fused_loss first"):
        use_fused_loss(llama, LossConfig(accum="param"))
    remove_fused_loss(llama)
    assert "forward" not in vars(llama)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kind": "plain"}, "kind: 'plain' is not 'fused'"),
        ({"ignore_index": 0}, "ignore_index: the model's own loss decides it"),
        ({"logit_softcapping": 2.0}, "logit_softcapping: the model's own loss decides it"),
    ],
)
def test_settings_that_cannot_be(setting, message, llama):
    with pytest.raises(ValueError, match=message):
        use_fused_loss(llama, LossConfig(**setting))
    assert "forward" not in vars(llama)


@pytest.mark.parametrize("config", [{"label_smoothing": 0.1}, {}, "fused"])
def test_a_config_of_another_type(config, llama):
    with pytest.raises(TypeError, match="config: an ac_loss.LossConfig is needed, got"):
        use_fused_loss(llama, config)
    assert "forward" not in vars(llama)


def test_models_that_have_no_such_loss(llama):
    with pytest.raises(FusedLossError, match=r"LlamaModel: no module found.*GiB for 1000 tokens"):
        use_fused_loss(llama.model)
    with pytest.raises(FusedLossError, match=r"give use_fused_loss the model inside of it, model\.module"):
        use_fused_loss(nn.DataParallel(nn.Linear(2, 2)))

    class WithoutLabels(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(2, 5)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, hidden):
            return self.lm_head(hidden)

    with pytest.raises(FusedLossError, match="takes no labels"):
        use_fused_loss(WithoutLabels())


def test_copies_and_pickles_train_by_themselves(llama, text, step):
    inputs = text(llama)
    expected = step(llama, inputs)
    use_fused_loss(llama)
    saved = io.BytesIO()
    torch.save(llama, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(llama),
        pickle.loads(pickle.dumps(llama)),
        torch.load(saved, weights_only=False),
    ):
        llama.zero_grad(set_to_none=True)
        step(other, inputs).assert_equal(expected)
        assert all(parameter.grad is None for parameter in llama.parameters())
        remove_fused_loss(other)
        assert step(other, inputs).logits_seen
    assert not step(llama, inputs).logits_seen


def test_evaluation_has_logits(llama, text):
    inputs = text(llama)
    expected = llama(**inputs)
    use_fused_loss(llama)
    with torch.no_grad():
        assert torch.equal(llama(**inputs).logits, expected.logits)
    llama.eval()
    output = llama(**inputs)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)
    assert llama.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False).shape == (3, 7)


def test_logits_of_training_are_there_on_request(llama, text):
    inputs = text(llama)
    expected = llama(**inputs).logits
    use_fused_loss(llama)
    logits = llama(**inputs).logits
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(logits.materialize(), expected)
    with pytest.raises(FusedLossError, match=r"argmax of the logits of LlamaForCausalLM at .*test_attach.py"):
        logits.argmax(-1)


def test_training_without_labels_warns_once(llama, text):
    inputs = text(llama)
    del inputs["labels"]
    use_fused_loss(llama)
    with pytest.warns(UserWarning, match="called in training without labels"):
        assert type(llama(**inputs).logits) is torch.Tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama(**inputs, labels=None)


def test_labels_by_position_and_tuples(llama, text):
    inputs = text(llama)
    expected = llama(**inputs).loss
    use_fused_loss(llama)
    loss, logits, *_ = llama(inputs["input_ids"], None, None, None, None, inputs["labels"], return_dict=False)
    torch.testing.assert_close(loss, expected)
    assert isinstance(logits, LazyLogits)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_gradient_accumulation(as_tensor, llama, text, step):
    inputs = text(llama)
    count = (inputs["labels"][:, 1:] != -100).sum()
    parts = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(0, 1), slice(1, 3))]
    expected = step(llama, inputs)
    use_fused_loss(llama)
    llama.zero_grad()
    losses = [llama(**part, num_items_in_batch=count if as_tensor else int(count)).loss for part in parts]
    sum(losses).backward()
    torch.testing.assert_close(sum(losses), expected.loss)
    for name, parameter in llama.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.gradients[name], rtol=1e-4, atol=1e-6)


def test_label_smoothing_and_z_loss_of_the_config(llama, text, step):
    inputs = text(llama)
    logits = llama(**inputs).logits[:, :-1].flatten(0, 1)
    labels = inputs["labels"][:, 1:].flatten()
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    expected = expected + 0.01 * logits.logsumexp(-1)[labels != -100].square().mean()
    use_fused_loss(llama, LossConfig(label_smoothing=0.1, z_loss=0.01))
    torch.testing.assert_close(step(llama, inputs).loss, expected)


def test_a_frozen_head_gets_no_gradient(build, text, step):
    model = build("LlamaForCausalLM")
    model.lm_head.requires_grad_(False)
    expected = step(model, text(model))
    use_fused_loss(model)
    step(model, text(model)).assert_equal(expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_the_blocks(reentrant, llama, text, step):
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    llama.enable_input_require_grads()
    expected = step(llama, text(llama))
    use_fused_loss(llama)
    step(llama, text(llama)).assert_equal(expected)


def test_autocast(llama, text, step):
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(llama, text(llama))
        use_fused_loss(llama)
        fused = step(llama, text(llama))
    fused.assert_equal(expected, loss=0.01, gradients=0.1)
    assert {gradient.dtype for gradient in fused.gradients.values()} == {torch.float32}


def test_the_head_of_a_subclass_of_linear_and_its_hooks(llama, text, step):
    class Doubled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    llama.lm_head.__class__ = Doubled
    llama.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.5,))
    llama.lm_head.register_forward_hook(lambda *call: call[-1] / 4)
    expected = step(llama, text(llama))
    use_fused_loss(llama)
    step(llama, text(llama)).assert_equal(expected)
    llama.lm_head.register_forward_hook(lambda *call: call[-1].softmax(-1))
    with pytest.raises(FusedLossError, match="softmax of the logits"):
        step(llama, text(llama))


class Adapter(nn.Module):
    """What PEFT puts in the place of a linear layer, in short."""

    def __init__(self, base_layer, dropout=0.0):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, 3, bias=False)
        self.lora_B = nn.Linear(3, base_layer.out_features, bias=False)
        self.dropout = nn.Dropout(dropout)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, hidden):
        result = self.base_layer(hidden)
        result = result + self.lora_B(self.lora_A(self.dropout(hidden))) * 2.0
        return result.to(hidden.dtype)


def test_a_teacher_in_the_midst_of_a_training_forward_has_logits(build, llama, text, step):
    """One that shares the student's head, and the student itself."""
    teacher, seen = build("LlamaForCausalLM").eval(), []
    teacher.lm_head = llama.lm_head
    right = step(llama, text(llama))

    def teach(module, args, output):
        if not seen:
            seen.append(None)
            with torch.no_grad():
                seen.extend(type(model(text(llama)["input_ids"]).logits) for model in (teacher, llama))

    llama.model.register_forward_hook(teach)
    use_fused_loss(llama)
    step(llama, text(llama)).assert_equal(right)
    assert seen == [None, torch.Tensor, torch.Tensor]


def test_a_head_in_use_is_not_used_by_another_forward(llama, text, step):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, labels):
            return self.inner(input_ids=input_ids, labels=labels)

    right = step(llama, text(llama))
    outer, failed = Outer(llama), []
    use_fused_loss(outer)
    use_fused_loss(llama)
    with pytest.raises(FusedLossError, match="'lm_head' is in use by a training forward of Outer around this one"):
        step(outer, text(llama))

    def run():
        try:
            llama(**text(llama))
        except FusedLossError as error:
            failed.append(str(error))

    def meanwhile(*_):
        if not failed:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    llama.model.register_forward_hook(meanwhile)
    step(llama, text(llama)).assert_equal(right)
    assert "is in use by a training forward of LlamaForCausalLM in another thread" in failed[0]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_that_waits_for_the_gradient_of_logits_is_refused(register, llama, text, step):
    use_fused_loss(llama)
    hook = getattr(llama.lm_head, register)(lambda *_: None)
    with pytest.raises(FusedLossError, match="its head 'lm_head' has a backward hook, which waits for the gradient of"):
        step(llama, text(llama))
    hook.remove()
    step(llama, text(llama))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("first", ["adapter", "loss"])
def test_an_adapter_on_the_head_is_added(dropout, first, build, text, step):
    """Case loss-11: it is never bypassed, whichever comes first, and with dropout as well."""
    model = build("CohereForCausalLM", logit_scale=0.5)
    torch.manual_seed(0)
    if first == "loss":
        use_fused_loss(model)
    model.lm_head = Adapter(model.lm_head, dropout)
    use_fused_loss(model)
    fused = step(model, text(model))
    assert fused.gradients["lm_head.lora_B.weight"].any()
    assert fused.gradients["lm_head.lora_A.weight"].any()
    remove_fused_loss(model)
    fused.assert_equal(step(model, text(model)))
    assert not fused.logits_seen


def test_peft(build, text, step):
    peft = pytest.importorskip("peft")
    for settings in (
        {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.3},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ):
        config = peft.LoraConfig(r=3, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        model = peft.get_peft_model(build("LlamaForCausalLM"), config).train()
        for attached in (model, model.get_base_model()):
            expected = step(model, text(model))
            use_fused_loss(attached)
            fused = step(model, text(model))
            fused.assert_equal(expected)
            assert not fused.logits_seen
            remove_fused_loss(attached)


def test_a_head_without_linear_is_refused_with_the_cost(llama, text, step):
    class Quantized(nn.Linear):
        def forward(self, hidden):
            return hidden @ self.weight.t()

    llama.lm_head.__class__ = Quantized
    use_fused_loss(llama)
    with pytest.raises(FusedLossError, match=r"'lm_head' \(Quantized\) does not multiply by F.linear.*GiB \(fp32, \["):
        step(llama, text(llama))


def test_a_model_that_goes_past_its_head_is_refused(llama, text, monkeypatch):
    """Case loss-18: never a silent fall-back."""

    def past_the_head(self, labels=None, **inputs):
        hidden = self.model(**inputs).last_hidden_state
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.t()).flatten(0, 1), labels.flatten())

    monkeypatch.setattr(type(llama), "forward", past_the_head)
    use_fused_loss(llama)
    with pytest.raises(FusedLossError, match="did not run its head, so its loss is not fused"):
        llama(**text(llama))


def test_several_heads_that_are_stacked_are_refused(build, text):
    model = build("MusicgenForCausalLM", num_codebooks=2)
    use_fused_loss(model)
    ids = torch.randint(9, 150, (2, 6))
    with pytest.raises(FusedLossError, match="stack of the logits of MusicgenForCausalLM"):
        model(input_ids=ids, labels=torch.randint(9, 150, (1, 6, 2)))


def test_entries_that_chameleon_sets(build, text, step):
    vq = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
    vq |= {"embed_dim": 32, "latent_channels": 32}
    tokens = {"<image>": 8, "IMGIMGAZ": 20, "IMGIMGBZ": 21}
    model = build("ChameleonForConditionalGeneration", vq_config=vq, vocabulary_map=tokens, swin_norm=False)
    inputs = text(model)
    inputs["labels"][(inputs["labels"] == 20) | (inputs["labels"] == 21)] = -100
    expected = step(model, inputs)
    use_fused_loss(model)
    fused = step(model, inputs)
    fused.assert_equal(expected)
    assert not fused.logits_seen
    inputs["labels"][0, 7] = 20
    with pytest.raises(FusedLossError, match="labels: 20 at flat position 6 is a token whose logit"):
        step(model, inputs)


def test_another_tool_that_wraps_the_forward(llama, text, step):
    expected = step(llama, text(llama))
    use_fused_loss(llama)
    fused = llama.forward

    def wrapper(*args, **kwargs):
        return fused(*args, **kwargs)

    wrapper.__wrapped__ = fused
    llama.forward = wrapper
    step(llama, text(llama)).assert_equal(expected)
    with pytest.raises(FusedLossError, match="wrapped by another tool"):
        remove_fused_loss(llama)
    llama.forward = types.MethodType(fused, llama)
    step(llama, text(llama)).assert_equal(expected)  # Accelerate binds what it unwraps
    remove_fused_loss(llama)
    assert "forward" not in vars(llama)


def test_a_forward_that_was_there_before_comes_back(llama, text, step):
    def forward(**inputs):
        return type(llama).forward(llama, **inputs)

    llama.forward = forward
    use_fused_loss(llama)
    assert not step(llama, text(llama)).logits_seen
    remove_fused_loss(llama)
    assert llama.forward is forward


def test_the_signature_is_that_of_the_model(llama):
    import inspect

    before = inspect.signature(llama.forward)
    use_fused_loss(llama)
    assert inspect.signature(llama.forward) == before


def test_compiled_blocks_are_exact_and_a_compiled_model_is_refused(build, text, step):
    model = build("LlamaForCausalLM", num_hidden_layers=1)
    inputs = text(model)
    expected = step(model, inputs)
    use_fused_loss(model)
    with pytest.raises(FusedLossError, match=r"model\.model\.compile\(\)"):
        torch.compile(model, backend="eager")(**inputs)
    model.model.compile(backend="eager")
    output = model(**inputs)
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss)
    assert isinstance(output.logits, LazyLogits)


def test_public_names():
    assert ac_loss.use_fused_loss is use_fused_loss
    assert ac_loss.remove_fused_loss is remove_fused_loss
    assert ac_loss.huggingface.LazyLogits is LazyLogits
