"""The class of a model is the one that its configuration says."""

import pytest
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ac_recipes.errors import UsageError
from ac_recipes.model_class import auto_class, reads_images

GEMMA3, LLAMA = transformers.Gemma3Config, transformers.LlamaConfig


@pytest.mark.parametrize(
    ("config", "architectures", "expected"),
    [
        (LLAMA, None, AutoModelForCausalLM),
        (LLAMA, ["LlamaForCausalLM"], AutoModelForCausalLM),
        (transformers.SmolVLMConfig, None, AutoModelForImageTextToText),
        (transformers.SmolVLMConfig, ["SmolVLMForConditionalGeneration"], AutoModelForImageTextToText),
        (GEMMA3, None, AutoModelForImageTextToText),
        (GEMMA3, ["Gemma3ForConditionalGeneration"], AutoModelForImageTextToText),
        (transformers.Gemma3TextConfig, ["Gemma3ForCausalLM"], AutoModelForCausalLM),
    ],
)
def test_what_the_checkpoint_says_decides(config, architectures, expected):
    assert auto_class(config(architectures=architectures)) is expected


@pytest.mark.parametrize(
    ("config", "architectures", "message"),
    [
        (LLAMA, ["LlamaForSequenceClassification"], "LlamaForSequenceClassification is neither .*LlamaForCausalLM of"),
        (LLAMA, ["LlamaModel"], "LlamaModel is neither a language model nor a vision-language model"),
        (transformers.ViTConfig, None, "neither a language model nor a vision-language model 'vit'"),
    ],
)
def test_another_kind_of_model_is_refused(config, architectures, message):
    with pytest.raises(UsageError, match=message):
        auto_class(config(architectures=architectures))
    assert not reads_images(config(architectures=architectures))
