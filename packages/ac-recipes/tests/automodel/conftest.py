"""A recipe as AutoModel's users write them, and its translation."""

import pytest

from ac_recipes.automodel import Translator
from ac_recipes.reader import RecipeError, read_recipe
from ac_recipes.reader.compose import compose, locate_in
from ac_recipes.reader.mistakes import MistakeLog
from ac_recipes.reader.plain import plain_of
from ac_recipes.recipe import Recipe

PRETRAIN = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  max_steps: 30
dist_env:
  backend: nccl
  timeout_minutes: 1
rng:
  _target_: nemo_automodel.components.training.rng.StatefulRNG
  seed: 1111
  ranked: true
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  torch_dtype: bf16
  config:
    _target_: transformers.models.llama.configuration_llama.LlamaConfig
    hidden_size: 64
    num_attention_heads: 4
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 1
  activation_checkpointing: true
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-5
ci:
  recipe_owner: someone
"""


@pytest.fixture(scope="session")
def pretrain() -> str:
    """A whole recipe that translates."""
    return PRETRAIN


@pytest.fixture(scope="session")
def translate():
    """`translate(text)`: the translated recipe as plain data, what was left out by path, and the mistakes' lines."""

    def translate(text):
        log, translator = MistakeLog(), Translator()
        tree = translator(compose(text, locate_in("a.yaml"), log).root, log)
        left_out = {left.path: left.reason for left in translator.left_out}
        return plain_of(tree), left_out, [str(mistake) for mistake in log.mistakes]

    return translate


@pytest.fixture(scope="session")
def read():
    """`read(text)`: the recipe and how it was translated."""

    def read(text):
        translator = Translator()
        return read_recipe(Recipe, "a.yaml", text=text, rewrite=translator), translator

    return read


@pytest.fixture(scope="session")
def mistakes(read):
    """`mistakes(text)`: the lines that reading it prints."""

    def mistakes(text):
        with pytest.raises(RecipeError) as caught:
            read(text)
        return str(caught.value).splitlines()

    return mistakes
