"""A vision-language recipe that trains in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ac_recipes.reader import read_recipe, split_overrides
from ac_recipes.recipe import Recipe

VLM = """\
model:
  config:
    model_type: smolvlm
    tie_word_embeddings: true
    vision_config: {{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
                    num_channels: 3, image_size: 16, patch_size: 4}}
    text_config: {{model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
                  num_attention_heads: 4, num_key_value_heads: 2}}
dataset: {{kind: digits, sequence_length: 32, validation_fraction: 0.002}}
tokenizer: {{vocab_size: 400}}
optimizer: {{lr: 3.0e-3}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 2, max_steps: 3, log_every_steps: 1}}
run: {{dir: {runs}}}
"""


@pytest.fixture(scope="module")
def vlm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm")
    path = folder / "vlm.yaml"
    path.write_text(VLM.format(runs=folder / "runs"))
    return path


@pytest.fixture(scope="module")
def vlm(vlm_file: Path) -> Callable[..., Recipe]:
    """The recipe; `vlm("section.field=value", ...)` with overrides."""

    def build(*settings: Any) -> Recipe:
        rest, overrides = split_overrides([f"--{setting}" for setting in settings])
        assert rest == []
        return read_recipe(Recipe, vlm_file, overrides)

    return build
