"""Blocks are found by the caller's choice or by structure; never a container, never a block in a block."""

import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import torch
from torch import nn

from ac_core import ActivationCheckpointingError, apply_activation_checkpointing, find_blocks
from ac_core.discovery.blocks import candidate_containers


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


def whys(root):
    return {block.name: block.why for block in find_blocks(root)}


def towers(**vision):
    return model(vision_tower=model(**vision), language_model=model(layers=nn.ModuleList([Block(), Block()])))


class ConvNorm(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.norm = nn.BatchNorm2d(2) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.conv(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x, cache=None):
        return self.out(self.qkv(x))


def test_a_stage_with_one_block_and_a_block_on_its_own_are_found_by_their_class():
    found = whys(model(stages=nn.ModuleList([Stage(2), Stage(3), Stage(1)]), last=Block()))
    assert [name for name, why in found.items() if why == "same class as other blocks"] == ["stages.2.blocks.0", "last"]
    assert len(found) == 7
    sequentials = model(layers=nn.ModuleList(nn.Sequential(*Block().children()) for _ in range(2)), head=nn.Sequential(
        nn.Linear(2, 2), nn.Linear(2, 2)
    ))  # fmt: skip
    assert list(whys(sequentials)) == ["layers.0", "layers.1"], "torch's own containers are no class of block"


def test_most_units_have_to_be_stages_for_a_list_to_be_one_of_stages():
    mixed = nn.ModuleList([Block(), Block(), Block(), Stage(2)])
    assert names(model(layers=mixed)) == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_stems_and_projectors_beside_a_language_model_are_units():
    root = towers(
        stem=nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3)),
        embeddings=nn.ModuleDict({"patches": nn.Conv2d(3, 4, 3), "positions": nn.Embedding(9, 4)}),
        blocks=nn.ModuleList([Block(), Block()]),
        merger=Expert(),
        head=nn.Linear(4, 4),
    )
    root.multi_modal_projector = Expert()
    root.lm_head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    found = {b.name: b.part for b in find_blocks(root) if b.why == "unit of a tower"}
    assert found == {
        "vision_tower.stem": "vision", "vision_tower.merger": "vision", "multi_modal_projector": "connector",
    }  # fmt: skip


def test_without_a_language_model_only_blocks_are_blocks():
    root = model(vision_tower=model(stem=Expert(), blocks=nn.ModuleList([Block(), Block()]), merger=Expert()))
    assert names(root) == ["vision_tower.blocks.0", "vision_tower.blocks.1"]


def test_light_layers_in_a_tower_are_units_with_those_of_their_class():
    root = towers(layers=nn.ModuleList([ConvNorm(), ConvNorm(), ConvNorm(norm=False)]))
    assert [name for name in names(root) if "vision" in name] == [f"vision_tower.layers.{i}" for i in range(3)]
    convs = towers(layers=nn.ModuleList(nn.Conv2d(2, 2, 3) for _ in range(3)))
    assert [name for name in names(convs) if "vision" in name] == [], "a lone filter saves nothing else"


def test_what_is_broadcast_and_what_is_parametrized_is_not_two_matrices():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 9, 4))
            self.patches = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.patches(x)

    assert names(model(layers=nn.ModuleList(Positions() for _ in range(2)))) == []
    normed = [nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3))) for _ in range(2)]
    assert names(model(layers=nn.ModuleList(normed))) == []


def test_a_module_under_several_names_is_one_block_under_the_first():
    shared = Block()
    assert names(model(first=shared, layers=nn.ModuleList([shared, Block()]))) == ["first", "layers.1"]
    assert names(model(layers=nn.ModuleList([shared] * 4))) == ["layers.0"]
    inside = model(layers=nn.ModuleList([Block(experts=2), Block(experts=2)]))
    inside.vision = nn.ModuleList(inside.layers[0].experts)
    assert names(inside) == ["layers.0", "layers.1"], "no block inside a block"


def test_numbered_attributes_are_blocks_where_there_is_no_list():
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b1, self.b2 = Block(), Block()

        def forward(self, x):
            return self.b2(self.b1(x))

    root = model(down1=Block(), down2=Block(), bottom=Block(), up1=Expert(), s1=Stages(), s2=Stages())
    assert names(root) == ["down1", "down2", "s1.b1", "s1.b2", "s2.b1", "s2.b2"]
    root.layers = nn.ModuleList([Expert(), Expert()])
    assert names(root) == ["up1", "layers.0", "layers.1"]


def test_attentions_that_a_model_hands_a_cache_of_its_own_are_left_alone():
    parallel = model(attentions=nn.ModuleList([Attention(), Attention()]), ffns=nn.ModuleList([Expert(), Expert()]))
    assert names(parallel) == ["ffns.0", "ffns.1"]
    assert names(model(layers=nn.ModuleList([Attention(), Attention()]))) == ["layers.0", "layers.1"]


def test_no_block_is_an_error_that_names_containers_and_classes():
    root = model(encoder=nn.ModuleList([nn.Linear(2, 2)] * 2), a=Expert(), b=Expert())
    assert candidate_containers(root) == ["encoder.* (2 x Linear)", "Expert (2 modules of this class)"]
    with pytest.raises(ActivationCheckpointingError, match=r"blocks=.*encoder\.\* \(2 x Linear\), Expert \(2 modules"):
        apply_activation_checkpointing(root)
    assert candidate_containers(nn.Sequential(nn.Linear(2, 2))) == ["* (1 x Linear)"]


def with_compiled_layers(root):
    for i, layer in enumerate(root.language_model.layers):
        root.language_model.layers[i] = torch.compile(layer)
    return root


@pytest.mark.parametrize(
    ("wrap", "before", "after"),
    [
        (torch.compile, "_orig_mod.", ""),
        (with_compiled_layers, "", "._orig_mod"),
        (nn.DataParallel, "module.", ""),
        (lambda m: nn.DataParallel(torch.compile(with_compiled_layers(m))), "module._orig_mod.", "._orig_mod"),
    ],
    ids=["compiled", "compiled blocks", "data parallel", "all three"],
)
def test_wrappers_of_torchs_own_are_seen_through(wrap, before, after):
    root = wrap(towers(blocks=nn.ModuleList([Block(), Block()])))
    assert {block.name: block.part for block in find_blocks(root)} == {
        f"{before}vision_tower.blocks.0": "vision",
        f"{before}vision_tower.blocks.1": "vision",
        f"{before}language_model.layers.0{after}": "language",
        f"{before}language_model.layers.1{after}": "language",
    }
    assert all(root.get_submodule(block.name) is block.module for block in find_blocks(root))


def test_sharded_and_parallel_models_have_the_blocks_of_the_model_inside():
    script = """
        import os
        import torch
        from torch import distributed, nn
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from ac_core import find_blocks

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.vision = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
                self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))

        def found(model):
            return [(block.name, block.part) for block in find_blocks(model)]

        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = distributed.init_device_mesh("cpu", (1,))
        plain = found(Net())
        sharded = Net()
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        assert found(fully_shard(sharded, mesh=mesh)) == plain, "FSDP2"
        assert found(DistributedDataParallel(Net())) == [(f"module.{n}", p) for n, p in plain], "DDP"
        older = Net()
        older.layers = nn.ModuleList(
            FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
            for layer in older.layers
        )
        inner = "._fsdp_wrapped_module"
        assert found(older) == [(n + inner * n.startswith("layers"), p) for n, p in plain], "FSDP1"
        os._exit(0)  # a gloo group that is destroyed can hang
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_adapters_do_not_make_a_block_of_a_linear_layer():
    peft = pytest.importorskip("peft")
    linears = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert names(peft.get_peft_model(linears, peft.LoraConfig(target_modules=["0", "2"]))) == []
    blocks = model(layers=nn.ModuleList([Block(), Block()]))
    adapted = peft.get_peft_model(blocks, peft.LoraConfig(target_modules=["up", "down"]))
    assert names(adapted) == ["base_model.model.layers.0", "base_model.model.layers.1"]


def test_the_work_grows_with_the_number_of_modules():
    def calls(depth):
        with torch.device("meta"):
            deep = Block()
            for _ in range(depth // 10):
                deep = nn.Sequential(deep, nn.Linear(2, 2))
            root = towers(blocks=nn.ModuleList(Block(experts=2) for _ in range(depth)), neck=deep)
        count = Counter()
        sys.setprofile(lambda _frame, event, _arg: count.update([event]))
        try:
            find_blocks(root)
        finally:
            sys.setprofile(None)
        return count["call"]

    calls(10)  # what is looked up once per class
    small, large = calls(50), calls(200)
    assert large < 4.4 * small


def test_every_layer_of_a_hybrid_model_is_a_block():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(config)
    assert len({"linear_attn" in dict(layer.named_children()) for layer in model.model.layers}) == 2
    report = apply_activation_checkpointing(model)
    assert report.applied_blocks == tuple(f"model.layers.{i}" for i in range(4))


def test_a_declared_stage_is_gone_through():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[1, 2])
    with torch.device("meta"):
        swin = transformers.SwinModel(config)
    assert names(swin) == [f"encoder.layers.{stage}.blocks.{i}" for stage in range(2) for i in range(2)]
