"""Blocks are found by the caller's choice or by structure; never a container, never a block in a block."""

import pytest
from torch import nn

from ac_core import find_blocks


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        if experts:
            self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))


class Stage(nn.Module):
    """Blocks and a downsampling, as in Swin and ConvNeXt."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.downsample = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.downsample(x)


def names(model, blocks=None):
    return [block.name for block in find_blocks(model, blocks)]


def model(**children):
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def test_children_of_a_repeated_container_are_blocks():
    assert names(model(layers=nn.ModuleList(Block() for _ in range(3)), head=nn.Linear(4, 4))) == [
        "layers.0", "layers.1", "layers.2",
    ]  # fmt: skip


def test_a_sequential_and_a_dict_hold_blocks_too():
    assert names(model(h=nn.Sequential(Block(), Block()))) == ["h.0", "h.1"]
    assert names(model(h=nn.ModuleDict({"a": Block(), "b": Block()}))) == ["h.a", "h.b"]
    assert names(nn.Sequential(Block(), Block())) == ["0", "1"]


def test_experts_inside_a_block_are_not_blocks():
    assert names(model(layers=nn.ModuleList(Block(experts=4) for _ in range(2)))) == ["layers.0", "layers.1"]


def test_stages_are_gone_through():
    assert names(model(stages=nn.ModuleList([Stage(2), Stage(3)]))) == [
        "stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1", "stages.1.blocks.2",
    ]  # fmt: skip


def test_simple_layers_are_not_blocks():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert names(model(layers=nn.ModuleList([Block()]))) == [], "one of a kind is not a repeated structure"


def test_torch_transformer_layers():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    assert names(encoder) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    "choice",
    [Block, "layers.[01]", lambda name, module: isinstance(module, Block), ["layers.0", "layers.1"]],
    ids=["class", "glob", "predicate", "several"],
)
def test_the_callers_choice_wins(choice):
    root = model(layers=nn.ModuleList([Block(), Block()]), other=nn.ModuleList([Stage(2), Stage(2)]))
    found = find_blocks(root, choice)
    assert [b.name for b in found][:2] == ["layers.0", "layers.1"]
    assert {b.why for b in found} == {"chosen by blocks="}


@pytest.mark.parametrize("choice", [42, [Block, 42], Block(), [Block()]], ids=["number", "list", "module", "modules"])
def test_a_choice_that_is_none_is_refused(choice):
    with pytest.raises(TypeError, match=r"blocks: (int|Block) is not a module class, a glob"):
        find_blocks(nn.Sequential(Block(), Block()), choice)
    with pytest.raises(TypeError, match="model: str is not a"):
        find_blocks("model")


def test_the_model_is_no_block_of_itself_and_lazy_modules_are_looked_at():
    assert names(nn.Sequential(Block(), Block()), "*") == ["0", "1"]
    lazy = nn.ModuleList(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)) for _ in range(2))
    assert names(model(layers=lazy)) == ["layers.0", "layers.1"]


def test_a_chosen_block_inside_a_chosen_block_is_part_of_it():
    assert names(model(stages=nn.ModuleList([Stage(2)])), [Stage, Block]) == ["stages.0"]


def test_trainable_tells_whether_any_parameter_needs_a_gradient():
    root = model(layers=nn.ModuleList(Block() for _ in range(3)))
    root.layers[1].requires_grad_(False)
    root.layers[2].requires_grad_(False).norm.weight.requires_grad_(True)
    assert [b.trainable for b in find_blocks(root)] == [True, False, True]


def test_parts_follow_the_names_on_the_path():
    towers = ("vision_tower", "audio_encoder", "language_model")
    root = model(**{name: model(layers=nn.ModuleList([Block(), Block()])) for name in towers})
    assert {b.name.partition(".")[0]: b.part for b in find_blocks(root)} == {
        "vision_tower": "vision", "audio_encoder": "audio", "language_model": "language",
    }  # fmt: skip
