"""Frozen towers are left out, adapters and gradients that only pass through are not, whenever they come."""

import copy
import warnings

import pytest
import torch
from torch import nn

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    apply_activation_checkpointing,
    find_blocks,
)
from ac_core.trainability import FROZEN, frozen_blocks, needs_gradient


class Tower(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class VisionLanguage(nn.Module):
    """Pixels through a vision tower and a connector, in front of token embeddings and a language model."""

    def __init__(self, stack, vision_depth):
        super().__init__()
        language = stack(depth=2)
        self.vision_tower = Tower(stack(depth=vision_depth).layers)
        self.connector = nn.Linear(16, 16)
        self.embed, self.language_model = language.embed, Tower(language.layers)
        self.prompt = None
        self.pixels = torch.linspace(-1, 1, 80).reshape(1, 5, 16)

    def forward(self, ids):
        pixels = self.pixels if self.prompt is None else self.pixels + self.prompt
        tokens = self.connector(self.vision_tower(pixels))
        return self.language_model(torch.cat([tokens.expand(len(ids), -1, -1), self.embed(ids)], dim=1))


class LoRA(nn.Module):
    """A frozen linear layer with a trainable one of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def add_adapters(tower):
    torch.manual_seed(3)
    for layer in tower.layers:
        layer.up = LoRA(layer.up)


@pytest.fixture
def vlm(stack):
    return lambda vision_depth=2: VisionLanguage(stack, vision_depth)


@pytest.fixture
def runs(count_forwards, train_step):
    """How often a block of the vision tower and one of the language model run in a step."""

    def count(model):
        vision = count_forwards(model.vision_tower.layers[0].norm)
        language = count_forwards(model.language_model.layers[0].norm)
        train_step(model)
        return vision(), language()

    return count


def reasons(report):
    return {group.part: (group.applied, group.reason) for group in report.groups}


def test_a_frozen_tower_is_left_out_and_keeps_no_byte(vlm, runs, assert_same_step, saved_bytes):
    shallow, deep, plain = vlm(2), vlm(6), vlm(6)
    for model in (shallow, deep, plain):
        model.vision_tower.requires_grad_(False)
    apply_activation_checkpointing(shallow)
    report = apply_activation_checkpointing(deep)
    assert reasons(report) == {"vision": ("none", FROZEN), "language": ("full", "")}
    assert report.applied_blocks == ("language_model.layers.0", "language_model.layers.1")
    assert saved_bytes(deep) == saved_bytes(shallow)
    assert_same_step(plain, deep)
    assert runs(deep) == (1, 2)


def test_what_is_unfrozen_later_is_checkpointed_from_then_on(vlm, runs, assert_same_step):
    model, plain = vlm(), vlm()
    model.vision_tower.requires_grad_(False)
    apply_activation_checkpointing(model)
    assert runs(model) == (1, 2)
    model.vision_tower.layers[1].requires_grad_(True)
    plain.vision_tower.layers[0].requires_grad_(False)
    assert_same_step(plain, model)
    assert runs(model) == (1, 2)  # the first of the tower still saves nothing
    model.requires_grad_(True)
    assert_same_step(vlm(), model)
    assert runs(model) == (2, 2)


def test_what_is_frozen_later_keeps_no_byte(vlm, saved_bytes, assert_same_step):
    models = [vlm(2), vlm(6), vlm(6)]
    for model in models[:2]:
        apply_activation_checkpointing(model)
    for model in models:
        model.vision_tower.requires_grad_(False)
    shallow, deep, plain = models
    assert saved_bytes(deep) == saved_bytes(shallow)
    assert_same_step(plain, deep)


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_in_the_vision_tower_alone_make_it_checkpointed(vlm, runs, assert_same_step, when):
    model, plain = vlm(), vlm()
    for m in (model, plain):
        m.requires_grad_(False)
    if when == "before":
        add_adapters(model.vision_tower)
    report = apply_activation_checkpointing(model)
    if when == "after":
        add_adapters(model.vision_tower)
    add_adapters(plain.vision_tower)
    assert reasons(report)["vision"] == (("full", "") if when == "before" else ("none", FROZEN))
    assert_same_step(plain, model)
    assert runs(model) == (2, 2)  # the gradient flows back through the frozen language blocks, which save too
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 4
    assert all(p.grad.abs().sum() > 0 for p in adapters)


@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_language_with_adapters_and_frozen_embeddings_needs_no_hook(vlm, runs, assert_same_step, when):
    model, plain = vlm(), vlm()
    for m in (model, plain):
        m.requires_grad_(False)
    if when == "before":
        add_adapters(model.language_model)
    report = apply_activation_checkpointing(model)
    if when == "after":
        add_adapters(model.language_model)
    add_adapters(plain.language_model)
    assert reasons(report)["language"] == ("full", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(plain, model)
        assert runs(model) == (1, 2)


def test_a_frozen_tower_behind_a_soft_prompt_is_checkpointed(vlm, runs, assert_same_step, saved_bytes):
    def prompted(depth):
        model = vlm(depth)
        model.vision_tower.requires_grad_(False)
        model.prompt = nn.Parameter(torch.full((16,), 0.1))
        return model

    model, plain = prompted(6), prompted(6)
    report = apply_activation_checkpointing(model)
    assert reasons(report)["vision"] == ("none", FROZEN)
    assert_same_step(plain, model)
    assert runs(model) == (2, 2)
    shallow = prompted(2)
    apply_activation_checkpointing(shallow)
    boundary = 5 * 16 * 4
    assert (saved_bytes(model) - saved_bytes(shallow)) / 4 == boundary
    assert (saved_bytes(plain) - saved_bytes(prompted(2))) / 4 > 3 * boundary


def test_a_dormant_tower_stays_so_in_a_copy(vlm, runs):
    model = vlm()
    model.vision_tower.requires_grad_(False)
    apply_activation_checkpointing(model)
    twin = copy.deepcopy(model)
    assert runs(twin) == (1, 2)
    twin.vision_tower.requires_grad_(True)
    assert runs(twin) == (2, 2)
    assert runs(model) == (1, 2)


def test_blocks_before_the_first_trainable_parameter_of_their_part_are_frozen_and_language_never_is(vlm):
    def frozen(model):
        return frozen_blocks(model, find_blocks(model))

    model = vlm().requires_grad_(False)
    tower = [block.name for block in find_blocks(model) if block.part == "vision"]
    assert frozen(model) == set(tower)
    model.vision_tower.layers[1].norm.bias.requires_grad_(True)
    assert frozen(model) == {tower[0]}
    model.vision_tower.layers[0].norm.bias.requires_grad_(True)
    assert frozen(model) == set()


def test_a_gradient_is_seen_in_parameters_and_inputs_and_supposed_where_it_cannot_be_told():
    frozen, trainable = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    plain, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    constants = [plain, None, True, 1, 0.5, "flash", torch.float32, torch.device("cpu"), plain.shape]
    assert not needs_gradient(frozen, [*constants, (plain, [plain]), {"x": plain}])
    assert needs_gradient(trainable, constants)
    for visible in (leaf, (plain, [leaf]), {"x": {"y": leaf}}, leaf * 2):
        assert needs_gradient(frozen, [plain, visible])
    assert needs_gradient(frozen, [plain, object()])


# Hugging Face and PEFT


def llava():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=128)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=5, vision_feature_select_strategy="full"
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_step(model):
    ids = torch.arange(24).reshape(2, 12) % 100 + 6
    ids[:, 2:7] = 5  # four patches and the class token
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, pixel_values=torch.linspace(-1, 1, 1536).reshape(2, 3, 16, 16)).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(left, right):
    assert torch.equal(left[0], right[0])
    assert left[1].keys() == right[1].keys()
    assert [n for n in left[1] if not torch.equal(left[1][n], right[1][n])] == []


def with_lora(model, pattern):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=pattern, r=2, init_lora_weights=False))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tower", ["vision_tower", "language_model"])
def test_peft_adapters_in_one_tower(tower, when):
    pattern = rf".*{tower}.*(q_proj|v_proj)"
    reference = llava_step(with_lora(llava(), pattern))
    assert all(grad.abs().sum() > 0 for grad in reference[1].values())
    model = llava()
    if when == "before":
        model = with_lora(model, pattern)
        applied = {group.part: group.applied for group in apply_activation_checkpointing(model).groups}
        assert applied == {"vision": "full" if tower == "vision_tower" else "none", "language": "full"}
    else:
        apply_activation_checkpointing(model)
        model = with_lora(model, pattern)
    runs = {part: [] for part in ("vision", "language")}
    for name, module in model.named_modules():
        if name.endswith("layers.0.mlp"):
            part = "vision" if "vision" in name else "language"
            module.register_forward_pre_hook(lambda *_, part=part: runs[part].append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(reference, llava_step(model))
    assert {part: len(calls) for part, calls in runs.items()} == {
        "vision": 2 if tower == "vision_tower" else 1,
        "language": 2,
    }


def test_peft_prefix_tuning_trains_where_the_cache_is_kept():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def build():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2
            )
        )
        return peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))

    def step(model):
        ids = torch.arange(24).reshape(2, 12)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    whole = build()
    apply_activation_checkpointing(whole)
    with pytest.raises(ActivationCheckpointingError, match="keep_cache=True"):
        step(whole)
    kept = build()
    report = apply_activation_checkpointing(kept, ActivationCheckpointingConfig(keep_cache=True))
    assert {group.applied for group in report.groups} == {"sub-modules"}
    assert_same(step(build()), step(kept))
