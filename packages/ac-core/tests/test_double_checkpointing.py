"""Another tool's checkpointing of the same blocks is refused, before ours or after; an outer one by intent works."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    remove_activation_checkpointing,
)

IDS = torch.arange(24).reshape(2, 12)
POLICIES = ["full", "selective"]


def wrapped(model, **options):
    """As accelerate's FSDP plugin and Lightning's FSDPStrategy do it."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, **options)


def composable(model):
    for layer in model.layers:
        composable_checkpoint(layer)


def in_the_loop(model, run, reentrant=False):
    """As model code that comes with its weights does it: the loop over the layers checkpoints each."""

    def forward(ids):
        x = model.embed(ids)
        for layer in model.layers:
            x = checkpoint(run(layer), x, use_reentrant=reentrant)
        return model.head(x)

    model.forward = forward


def custom_forward(layer):
    def forward(*inputs):
        return layer(*inputs)

    return forward


TOOLS = {
    "wrapper": wrapped,
    "reentrant wrapper": partial(wrapped, checkpoint_impl=CheckpointImpl.REENTRANT),
    "composable": composable,
    "loop over layer.__call__": partial(in_the_loop, run=lambda layer: layer.__call__),
    "loop over partial": partial(in_the_loop, run=lambda layer: partial(layer.__call__, scale=torch.ones(()))),
    "loop over closure": partial(in_the_loop, run=custom_forward),
    "reentrant loop": partial(in_the_loop, run=lambda layer: layer.__call__, reentrant=True),
    "reentrant loop over closure": partial(in_the_loop, run=custom_forward, reentrant=True),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_tool_that_comes_after_ours_is_refused_in_the_first_step(stack, tool, policy):
    model = stack()
    apply_activation_checkpointing(model, policy)
    tool(model)
    with torch.no_grad():
        model(IDS)  # a validation before training checkpoints nothing
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.\d' is checkpointed by ac-core and by a check"):
        model(IDS).sum().backward()
    remove_activation_checkpointing(model)
    model(IDS).sum().backward()


def test_the_error_names_what_to_turn_off(stack):
    model = stack()
    apply_activation_checkpointing(model)
    wrapped(model)
    with pytest.raises(ActivationCheckpointingError) as error:
        model(IDS)
    remedies = (
        "gradient_checkpointing_disable()",
        "activation_checkpointing",
        "activation_checkpointing_policy",
        "remove_activation_checkpointing",
    )
    assert all(remedy in str(error.value) for remedy in remedies)


def test_wrappers_around_and_inside_declared_blocks_are_seen_before_ours(stack):
    around = stack()
    wrapped(around)
    blocks = ["layers.*._checkpoint_wrapped_module"]
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.0' is already checkpointed by torch's"):
        apply_activation_checkpointing(around, blocks=blocks)
    with pytest.warns(UserWarning, match="already checkpointed by torch's"):
        report = apply_activation_checkpointing(around, ActivationCheckpointingConfig(strict=False), blocks=blocks)
    assert report.applied_blocks == ()
    inside = stack()
    inside.layers[2].up = checkpoint_wrapper(inside.layers[2].up)
    with pytest.raises(ActivationCheckpointingError, match=r"'layers\.2\.up' is already checkpointed by torch's"):
        apply_activation_checkpointing(inside)


def test_a_wrapper_put_inside_a_block_after_ours_is_refused(stack):
    model = stack()
    apply_activation_checkpointing(model)
    model.layers[1].up = checkpoint_wrapper(model.layers[1].up)
    with pytest.raises(ActivationCheckpointingError, match=r"block 'layers\.1' is checkpointed .* torch's"):
        model(IDS)


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
def test_a_flag_on_the_model_means_its_loop_unless_blocks_have_their_own(stack, flag):
    model = stack()
    setattr(model, flag, True)
    with pytest.raises(ActivationCheckpointingError, match="'Stack' is already checkpointed by"):
        apply_activation_checkpointing(model)
    for layer in model.layers:
        setattr(layer, flag, False)
    assert len(apply_activation_checkpointing(model).applied_blocks) == 4


def test_a_stage_that_checkpoints_itself_is_seen_from_the_blocks_inside(stack):
    class Stage(nn.Sequential):
        gradient_checkpointing = False

    model = nn.Sequential(Stage(*stack().layers), Stage(*stack().layers))
    for block in (*model[0], *model[1]):
        block.gradient_checkpointing = False
    model[1].gradient_checkpointing = True
    with pytest.raises(ActivationCheckpointingError, match="'1' is already checkpointed by Hugging Face"):
        apply_activation_checkpointing(model, blocks="?.?")
    config = ActivationCheckpointingConfig(layers="0-3")
    assert len(apply_activation_checkpointing(model, config, blocks="?.?").applied_blocks) == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_an_outer_checkpoint_around_more_than_a_block_works(stack, assert_same_step, reentrant, policy):
    def segments(model):
        def forward(ids):
            x = model.embed(ids)
            first, second, third, fourth = model.layers
            x = checkpoint(lambda x: second(first(x)), x, use_reentrant=reentrant)
            x = checkpoint(lambda x: third(x) * model.head.weight.mean(), x, use_reentrant=reentrant)
            return model.head(checkpoint_sequential(nn.Sequential(fourth, nn.GELU()), 1, x, use_reentrant=reentrant))

        model.forward = forward
        return model

    model = stack(dropout=0.2)
    apply_activation_checkpointing(model, policy)
    assert_same_step(segments(model), segments(stack(dropout=0.2)))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_outer_checkpoint_around_the_model_works(stack, assert_same_step, policy):
    model = stack(dropout=0.2)
    apply_activation_checkpointing(model, policy)
    assert_same_step(checkpoint_wrapper(nn.Sequential(model)), nn.Sequential(stack(dropout=0.2)))


def test_offloading_around_a_block_is_no_checkpoint(stack, assert_same_step):
    model = stack()
    apply_activation_checkpointing(model)
    for layer in model.layers:
        offload = torch.autograd.graph.save_on_cpu()
        layer.register_forward_pre_hook(lambda *_, offload=offload: offload.__enter__() and None)
        layer.register_forward_hook(lambda *_, offload=offload: offload.__exit__(None, None, None))
    assert_same_step(model, stack())


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama():
    transformers = pytest.importorskip("transformers", reason="ac-core alone does not need transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def llama_step(model):
    model.train()(input_ids=IDS, labels=IDS).loss.backward()


def test_wrappers_around_hugging_face_layers_are_seen_before_and_after():
    model = llama()
    wrapped(model.model)
    with pytest.raises(ActivationCheckpointingError, match=r"'model\.layers\.0' is already checkpointed by torch's"):
        apply_activation_checkpointing(model)
    model = llama()
    apply_activation_checkpointing(model)
    wrapped(model.model)
    with pytest.raises(ActivationCheckpointingError, match=r"block 'model\.layers\.0' is checkpointed by ac-core and"):
        llama_step(model)


def test_every_second_layer_of_hugging_face_leaves_the_others_to_ours():
    model = llama()
    model.activation_checkpointing_enable(every_n_layers=2)
    with pytest.raises(ActivationCheckpointingError, match=r"'model\.layers\.0' is already checkpointed by Hugging"):
        apply_activation_checkpointing(model)
    apply_activation_checkpointing(model, ActivationCheckpointingConfig(layers="1"))
    llama_step(model)


@pytest.mark.parametrize("when", ["before the Trainer", "after it is built"])
@pytest.mark.parametrize("setting", ["activation_checkpointing", "gradient_checkpointing"])
def test_the_trainers_own_setting_is_refused_in_its_first_step(tmp_path, setting, when):
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    from transformers import Trainer, TrainingArguments

    model = llama()
    before = [p.clone() for p in model.parameters()]
    settings = TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to=[], **{setting: True})
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 16
    if when == "before the Trainer":
        apply_activation_checkpointing(model)
    trainer = Trainer(model, settings, train_dataset=data)
    if when == "after it is built":
        apply_activation_checkpointing(model)
    with pytest.raises(ActivationCheckpointingError, match=r"by Hugging Face .* in the trainer's settings"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_what_peft_switches_on_for_quantised_models_is_refused():
    peft = pytest.importorskip("peft")

    def prepared(model, **options):
        model.is_loaded_in_8bit = True  # what makes peft enable checkpointing, without a GPU to quantise on
        model = peft.prepare_model_for_kbit_training(model, **options)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    with pytest.raises(ActivationCheckpointingError, match="is already checkpointed by Hugging Face"):
        apply_activation_checkpointing(prepared(llama()))
    ours_first = llama()
    apply_activation_checkpointing(ours_first)
    adapted = prepared(ours_first)
    with pytest.raises(ActivationCheckpointingError, match="is checkpointed by ac-core and by Hugging Face"):
        llama_step(adapted)
    model = prepared(llama(), use_gradient_checkpointing=False)
    apply_activation_checkpointing(model)
    llama_step(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ActivationCheckpointingError, match="is checkpointed by ac-core and by Hugging Face"):
        llama_step(model)
