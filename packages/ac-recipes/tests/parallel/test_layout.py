"""Sizes against the number of ranks, and against the model's configuration."""

import re

import pytest

from ac_core import DDPConfig, FSDP2Config
from ac_recipes.errors import UsageError
from ac_recipes.load import load_recipe
from ac_recipes.parallel.layout import Layout, layout_of
from ac_recipes.reader import RecipeError, split_overrides


def test_what_the_other_sizes_leave_over_is_data_parallel():
    assert layout_of(FSDP2Config(), 1) == Layout()
    assert layout_of(FSDP2Config(tp_size=2), 8) == Layout(dp_shard=4, tp=2)
    assert layout_of(FSDP2Config(tp_size=2, dp_replicate_size=2), 8) == Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert layout_of(FSDP2Config(ep_size=4, dp_size=8), 8) == Layout(dp_shard=8, ep=4)
    assert layout_of(DDPConfig(tp_size=2), 2) == Layout(tp=2)
    assert str(layout_of(FSDP2Config(tp_size=2, dp_replicate_size=2), 8)) == "8 ranks: dp 4, dp_replicate 2, tp 2"


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (FSDP2Config(tp_size=2), 1, "tp_size: the run has 1 rank, not a multiple of 2 .*--nproc-per-node 2"),
        (FSDP2Config(tp_size=2), 3, "3 ranks, not a multiple of 2 .tp_size 2.; start it with --nproc-per-node 4"),
        (FSDP2Config(dp_size=2, tp_size=2), 2, "dp_size 2 x tp_size 2 are 4 ranks, but the run has 2; .*-node 4"),
        (FSDP2Config(dp_size=4), 1, "dp_size: 4 ranks asked for, but the run has 1; start it with --nproc-per-node 4"),
        (FSDP2Config(ep_size=4), 2, "ep_size: 4 does not divide the 2 data-parallel ranks .*--nproc-per-node 4"),
        (FSDP2Config(dp_replicate_size=2), 1, "dp_replicate_size: the run has 1 rank, not a multiple of 2"),
        (DDPConfig(tp_size=2), 4, "tp_size: 2 with strategy 'ddp' works for one data-parallel rank alone"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused_with_the_remedy(config, ranks, message):
    with pytest.raises(UsageError, match=message):
        layout_of(config, ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["distributed.tp_size=3"], "tp_size: 3 ranks cannot share out num_attention_heads 4 equally; .* 1, 2, 4"),
        (["distributed.ep_size=2"], "distributed.ep_size: 2: Llama has no experts to share out"),
        (["distributed.tp_size=2", "model.config={model_type: gpt2, n_layer: 1}"], "no tensor-parallel plan for GPT2"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_told_at_the_field(tiny_file, settings, message):
    _, overrides = split_overrides([f"--{setting}" for setting in settings])
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tiny_file), overrides)
    assert re.search(rf"command line:\d+:\d+: .*{message}", str(caught.value))
