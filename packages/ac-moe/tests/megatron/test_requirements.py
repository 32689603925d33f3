"""What is refused before the first step, with every reason at once."""

from typing import Any

import pytest
import torch
from ac_moe_megatron import block, config, megatron_on_cpu
from ac_moe_ranks import Ranks

import ac_moe


def refusal(rank: int, settings: dict[str, Any], mode: str = "combine", part: str = "block") -> list[str]:
    """The lines of the error for a model whose settings are changed after it was built."""
    with megatron_on_cpu():
        model = block(config("uniform 1"))
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        for name, value in settings.items():
            setattr(model.config, name, value)
        given = {"block": model, "layer": model.layers[0], "moe": model.layers[1].mlp}[part]
        with pytest.raises(ValueError, match=r"\w") as caught:
            ac_moe.megatron.enable(given, mode)
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before  # nothing was done
        return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"fp8": "hybrid"}, "fp8, fp4: Megatron then checkpoints through Transformer Engine"),
        ({"fp4": "e2m1"}, "fp8, fp4: Megatron then checkpoints through Transformer Engine"),
        ({"moe_flex_dispatcher_backend": "deepep"}, "moe_flex_dispatcher_backend: 'deepep' keeps its routing"),
        ({"moe_token_dispatcher_type": "pigeon"}, "moe_token_dispatcher_type: 'pigeon' is not known"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap: True"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm: True"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl: 'local'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings(ranks: Ranks, settings: dict[str, Any], line: str) -> None:
    for lines in ranks.run(refusal, settings=settings):
        assert len(lines) == 1
        assert lines[0].startswith(line)


def test_all_at_once(ranks: Ranks) -> None:
    settings = {"fp8": "hybrid", "cuda_graph_impl": "local", "moe_shared_expert_overlap": True}
    assert [len(lines) for lines in ranks.run(refusal, settings=settings)] == [3, 3]


@pytest.mark.parametrize("part", ["layer", "moe"])
def test_full_recompute_needs_the_block(ranks: Ranks, part: str) -> None:
    (line,), _ = ranks.run(refusal, settings={}, part=part)
    assert line.startswith("recompute_granularity: 'full' is done by the TransformerBlock, which is not in what was")


def other_inputs(rank: int) -> None:
    with megatron_on_cpu():
        with pytest.raises(TypeError, match="model: list is no torch.nn.Module"):
            ac_moe.megatron.enable([], "combine")
        with pytest.raises(ValueError, match="model: Linear holds no MoELayer of megatron-core"):
            ac_moe.megatron.enable(torch.nn.Linear(2, 2), "combine")
        with pytest.raises(ValueError, match="mode: 'all' is not one of"):
            ac_moe.megatron.enable(block(config()), "all")


def test_other_inputs(ranks: Ranks) -> None:
    ranks.run(other_inputs)


# ---- moe_tail


def unmet(rank: int, dispatcher: str, experts: str | None, settings: dict[str, Any], hook: bool) -> list[str]:
    with megatron_on_cpu():
        model = block(config("uniform 1", dispatcher), experts)
        for name, value in settings.items():
            setattr(model.config, name, value)
        if hook:
            for layer in model.layers:
                layer.mlp.experts.register_forward_hook(lambda *_: None)
        with pytest.raises(ac_moe.MoETailError, match="layers.0.mlp, layers.1.mlp") as caught:
            ac_moe.megatron.enable(model, "moe_tail")
        ac_moe.megatron.enable(model, "combine")
        return [text.split(":")[0] for text in caught.value.unmet]


@pytest.mark.parametrize(
    ("dispatcher", "experts", "settings", "hook", "expected"),
    [
        ("flex", "sequential", {}, False, ["experts"]),
        ("alltoall", None, {}, False, ["dispatcher"]),
        ("allgather", "sequential", {}, False, ["dispatcher", "experts"]),
        (
            *("alltoall", "sequential", {"add_bias_linear": True, "moe_latent_size": 16}, True),
            [
                *("dispatcher", "experts", "the down projection adds a bias to its output"),
                *("a latent projection reads the output of the experts", "a forward hook of the experts reads the "),
            ],
        ),
    ],
    ids=["experts", "alltoall", "both", "everything"],
)
def test_moe_tail(  # noqa: PLR0917
    ranks: Ranks, dispatcher: str, experts: str | None, settings: dict[str, Any], hook: bool, expected: list[str]
) -> None:
    told = ranks.run(unmet, dispatcher=dispatcher, experts=experts, settings=settings, hook=hook)[0]
    assert len(told) == len(expected)
    assert all(text.startswith(start) for text, start in zip(told, expected, strict=True))
