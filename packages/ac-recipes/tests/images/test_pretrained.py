"""A pretrained vision-language model is loaded as what it is, and goes on with images."""

import json

import pytest
import torch
from transformers import SmolVLMForConditionalGeneration

from ac_recipes.data.tokenizer import train_tokenizer
from ac_recipes.errors import UsageError
from ac_recipes.images.examples import IMAGE, SPECIAL_TOKENS
from ac_recipes.images.questions import texts
from ac_recipes.pretrained import load_model
from ac_recipes.training.model import build_model
from ac_recipes.training.trainer import train

pytest.importorskip("sklearn")

FOLDER = "model.pretrained_model_name_or_path="
OWN = ("model.config=null", "tokenizer.vocab_size=2048")


@pytest.fixture(scope="module")
def checkpoint(vlm, tmp_path_factory):
    """A folder with a small SmolVLM and a tokenizer for conversations about images."""
    folder = tmp_path_factory.mktemp("smolvlm")
    tokenizer = train_tokenizer(texts(), 400, SPECIAL_TOKENS)
    fields = {"image_token_id": tokenizer.convert_tokens_to_ids(IMAGE)}
    build_model(vlm().model, len(tokenizer), 7, torch.device("cpu"), fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_it_is_loaded_with_all_its_weights_and_trains_its_tower(vlm, checkpoint):
    before = load_model(str(checkpoint), dtype=torch.float32)
    assert type(before) is SmolVLMForConditionalGeneration
    recipe = vlm(f"{FOLDER}{checkpoint}", *OWN, "step_scheduler.max_steps=1")
    model = build_model(recipe.model, 300, 0, torch.device("cpu"))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
    assert train(recipe, "tuned").steps == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["SmolVLMModel"]}, "SmolVLMModel is neither a language model nor a vision-language model"),
        ({"image_token_id": 9}, "its token '<image>' is 1, and .* takes 9 for an image; use the model's own"),
        ({"model_type": "llama"}, r"can be shown to smolvlm and idefics3, not to llama"),
    ],
)
def test_what_does_not_fit_is_refused(vlm, checkpoint, tmp_path, change, message):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError, match=message):
        train(vlm(f"{FOLDER}{tmp_path}", *OWN), "tuned")


def test_a_tokenizer_without_the_tokens_of_a_conversation_is_refused(vlm, checkpoint, tmp_path):
    train_tokenizer(texts(), 400).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"^tokenizer: .* has no token '<image>', and conversations about digits are"):
        train(vlm(f"{FOLDER}{checkpoint}", f"tokenizer.pretrained_model_name_or_path={tmp_path}", *OWN), "tuned")
