"""What does not fit the images is a mistake in the recipe, where it stands."""

import pytest

from ac_recipes.images.layout import ImageLayout, layout_of
from ac_recipes.load import load_recipe
from ac_recipes.model_config import transformers_config
from ac_recipes.reader import RecipeError, split_overrides


def test_tokens_of_an_image(vlm):
    assert layout_of(transformers_config(vlm().model.config)) == ImageLayout(tokens=4, side=16, channels=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.config.scale_factor=3"], "model.config.scale_factor: patches of"),
        (["dataset.sequence_length=8"], "dataset.sequence_length: 8 is too short for a question with its image"),
        (["model.config={model_type: llama, hidden_size: 32}"], "can be shown to smolvlm and idefics3, not to llama"),
        (
            ["dataset.kind=text"],
            "model.config.model_type: smolvlm reads images, and dataset.kind 'text' has none, so that its vision tower",
        ),
        (["model.config.image_token_id=3"], "model.config.image_token_id: the tokenizer of the run decides it"),
        (["model.config.vision_config.image_size=12"], "vision_config.image_size: 12 is not a multiple of 8"),
        (["model.config.vision_config.patch_size=3"], "vision_config.patch_size: patches of 3 pixels, 2 x 2 of them"),
        (
            ["model.config.vision_config={hiden_size: 16}"],
            "model.config.vision_config.hiden_size: unknown field of SmolVLMVisionConfig; did you mean 'hidden_size'?",
        ),
        (["model.config.text_config.model_type=lama"], "model.config.text_config.model_type: transformers has no"),
        (["model.config.text_config.max_position_embeddings=16"], "dataset.sequence_length: 32 tokens are more than"),
        (
            ["model.config.text_config.num_hidden_layers=2.5"],
            "command line:1:1: model.config.text_config.num_hidden_layers: expected int, got float (value: 2.5)",
        ),
        (["dataset.kind=digts"], "did you mean 'digits'?"),
        (["dataset.text=pydoc_topics"], "dataset.text: "),
        (["dataset.sequence_length=0"], "dataset.sequence_length: 0 is below 1"),
        (["dataset.validation_fraction=1.0"], "dataset.validation_fraction: 1.0 is not in [0, 1)"),
        (["freeze_config.freeze_vison_tower=true"], "did you mean 'freeze_vision_tower'?"),
    ],
)
@pytest.mark.parametrize("quick", [True, False])
def test_refused_at_the_field(vlm_file, settings, message, quick):
    _, overrides = split_overrides([f"--{setting}" for setting in settings])
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(vlm_file), overrides, quick=quick)
    assert message in str(caught.value)


def test_a_field_of_the_language_model_is_none_of_the_whole(vlm_file):
    with pytest.raises(RecipeError, match=r"model\.config\.vocab_size: unknown field of SmolVLMConfig"):
        load_recipe(str(vlm_file), split_overrides(["--model.config.vocab_size=400"])[1])
