"""What a training program does with the result: wrap, clip, save, load, print."""

from pathlib import Path

import ac_moe_hf as hf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ac_moe_ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ac_moe

EXACT = 1e-12  # float64


def wrapped(rank: int, way: str, replicas: int) -> tuple[float, list[str]]:
    """Two microbatches under a wrapper for the dense part; the error, and on which mesh each expert weight is."""
    world = dist.get_world_size()
    expected = hf.one_process(hf.StandIn().double(), microbatches=2, ranks=world)
    model = hf.StandIn().double()
    ep = hf.mesh(replicas, world // replicas)
    dense = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    sharded = ac_moe.parallelize(model, ep, dispatcher_recompute_cache="moe_tail")
    run: nn.Module = model
    if way == "fsdp, experts ignored":
        for layer in model.layers:
            fully_shard(layer, mesh=dense, ignored_params=set(sharded.expert_parameters()))
        fully_shard(model, mesh=dense, ignored_params=set(sharded.expert_parameters()))
    else:
        sharded.fully_shard_experts(ep["replica"])
        if way == "fsdp":
            for layer in model.layers:
                fully_shard(layer, mesh=dense)
            fully_shard(model, mesh=dense)
        else:
            run = nn.parallel.DistributedDataParallel(model)
    hf.checkpoint_layers(model, sharded.context_fn)
    for number in range(2):
        hf.loss_of(run, hf.batch(rank, number)).backward()
    return hf.furthest(hf.gradients(model), expected), [str(p.placements) for p in sharded.expert_parameters()]


@pytest.mark.parametrize("way", ["fsdp", "fsdp, experts ignored", "ddp"])
def test_gradients_under_wrappers_of_the_dense_part(ranks: Ranks, way: str) -> None:
    for error, _ in ranks.run(wrapped, way=way, replicas=1):
        assert error < EXACT


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory):
    pool = Ranks(4, tmp_path_factory.mktemp("four"))
    yield pool
    pool.close()


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_experts_shared_out_and_replicated_on_four_ranks(four_ranks: Ranks, way: str) -> None:
    for error, placements in four_ranks.run(wrapped, way=way, replicas=2):
        assert error < EXACT
        assert all("_StridedShard" in told for told in placements)


def replicas_refused(rank: int) -> list[str]:
    """What `fully_shard_experts` says of meshes that are not those of the copies, and of a second call."""
    ep = hf.mesh(2)
    sharded = ac_moe.parallelize(hf.StandIn(), ep)
    told = []
    for mesh in (ep, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), None):
        with pytest.raises((ValueError, TypeError)) as caught:
            sharded.fully_shard_experts(mesh)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    replica = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "ep"))
    sharded = ac_moe.parallelize(hf.StandIn(), replica["ep"])
    sharded.fully_shard_experts(replica["replica"])
    with pytest.raises(ValueError, match="is a unit of FSDP2 already; call fully_shard_experts once"):
        sharded.fully_shard_experts(replica["replica"])
    return told


def test_meshes_of_other_experts_are_refused(ranks: Ranks) -> None:
    for rank, told in enumerate(ranks.run(replicas_refused)):
        for text in told[:2]:
            assert text.startswith("ValueError: mesh: ")
            assert f"holds ranks [{1 - rank}], which have other experts than rank {rank}" in text
        assert told[2].startswith('TypeError: mesh: NoneType is not a DeviceMesh; give mesh["replica"] of')


def mixed_precision(rank: int) -> tuple[str, str]:
    """What the experts work in, and the router's weights, which the model makes in float32."""
    model = hf.StandIn()
    for layer in model.layers:
        layer.gate.register_forward_hook(lambda module, args, logits: logits.float())
    ep = hf.mesh(1, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = ac_moe.parallelize(model, ep)
    sharded.fully_shard_experts(ep["replica"], mp_policy=policy)
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), mp_policy=policy)
    seen = []
    experts = model.layers[0].experts
    experts.register_forward_pre_hook(lambda module, args: seen.append((module.down_proj.dtype, args[2].dtype)))
    hf.loss_of(model, hf.batch(rank)).backward()
    assert experts.down_proj.grad.to_local().isfinite().all()
    return tuple(str(dtype) for dtype in seen[0])


def test_mixed_precision_of_fsdp_reaches_the_experts(ranks: Ranks) -> None:
    assert ranks.run(mixed_precision) == [("torch.bfloat16", "torch.float32")] * 2


def clipped(rank: int, norm_type: float) -> None:
    expected = hf.StandIn().double()
    hf.one_process(expected)
    wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.01, norm_type)
    for way in ("plain", "fsdp"):
        model = hf.StandIn().double()
        ep = hf.mesh(1, 2)
        sharded = ac_moe.parallelize(model, ep)
        if way == "fsdp":
            sharded.fully_shard_experts(ep["replica"])
            fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        hf.loss_of(model, hf.batch(rank)).backward()
        if way == "plain":
            hf.average_dense_gradients(model)
        norm = sharded.clip_grad_norm_(0.01, norm_type)
        assert wanted > 0.01
        assert type(norm) is torch.Tensor
        assert abs(norm - wanted) < EXACT
        actual = hf.gradients(model)
        assert hf.furthest(actual, {key: p.grad for key, p in expected.named_parameters()}) < EXACT


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm_is_that_of_one_process(ranks: Ranks, norm_type: float) -> None:
    ranks.run(clipped, norm_type=norm_type)


def plain_to(rank: int, folder: str, family: str) -> None:
    """A plain model saves on one rank; the sharded one loads."""
    source = hf.build(family)
    if rank == 0:
        dcp.save({"model": source.state_dict()}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    model = hf.build(family)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    ac_moe.parallelize(model, hf.mesh(2))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    _same(hf.whole(model.state_dict().items()), source.state_dict())


def to_plain(rank: int, folder: str, family: str) -> None:
    """The sharded model saves on both ranks; a plain one loads on each."""
    source = hf.build(family)
    model = hf.build(family)
    ac_moe.parallelize(model, hf.mesh(2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    plain = hf.build(family)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    _same(plain.state_dict(), source.state_dict())
    dist.barrier()


def _same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for key, wanted in expected.items():
        assert torch.equal(actual[key], wanted), key
    assert any("experts" in key and wanted.any() for key, wanted in expected.items())


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("way", [plain_to, to_plain])
def test_distributed_checkpoints_are_those_of_the_original_model(
    ranks: Ranks, tmp_path: Path, way: object, family: str
) -> None:
    pytest.importorskip("transformers")
    ranks.run(way, folder=str(tmp_path / "checkpoint"), family=family)


def pretrained(rank: int, folder: str) -> None:
    """`save_pretrained` writes the published layout, a matrix for each expert, and `from_pretrained` reads it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = hf.build("Mixtral", torch.float32)
    model = hf.build("Mixtral", torch.float32)
    ac_moe.parallelize(model, hf.mesh(2))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    keys = load_file(f"{folder}/model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in keys
    _same(AutoModelForCausalLM.from_pretrained(folder).state_dict(), source.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ac_moe.parallelize(loaded, hf.mesh(2))
    _same(hf.whole(loaded.state_dict().items()), source.state_dict())


def test_save_pretrained_and_from_pretrained(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks.run(pretrained, folder=str(tmp_path / "pretrained"))


def from_meta(rank: int) -> float:
    """Built without memory, sharded, then given memory for this rank's part and the weights of the whole."""
    source = hf.StandIn().double()
    expected = hf.one_process(hf.StandIn().double())
    with torch.device("meta"):
        model = hf.StandIn().double()
    sharded = ac_moe.parallelize(model, hf.mesh(2))
    assert all(p.is_meta for p in sharded.expert_parameters())
    model.to_empty(device="cpu")
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    hf.loss_of(model, hf.batch(rank)).backward()
    hf.average_dense_gradients(model)
    return hf.furthest(hf.gradients(model), expected)


def test_model_on_the_meta_device(ranks: Ranks) -> None:
    assert max(ranks.run(from_meta)) < EXACT


def printed(rank: int) -> tuple[str, type, list[bool]]:
    sharded = ac_moe.parallelize(hf.StandIn(), hf.mesh(2), dispatcher_recompute_cache="combine")
    forward, recompute = sharded.context_fn()
    assert forward is not recompute
    return str(sharded), type(sharded), [isinstance(p, DTensor) for p in sharded.expert_parameters()]


def test_printed(ranks: Ranks) -> None:
    (text, kind, sharded), (other, *_) = ranks.run(printed)
    assert kind is ac_moe.ExpertParallel
    assert sharded == [True] * 2 * hf.LAYERS
    head, line, advice = text.splitlines()
    assert head == (
        "expert parallelism over 2 ranks, dispatcher alltoall, recompute cache combine, gradients as mean over ranks"
    )
    assert line == (
        "  2 x layers.*.experts: Experts, 4 experts, 2 on a rank, here 0-1; router weight inside the activation; "
        "logits and top-k pinned"
    )
    assert "here 2-3" in other
    assert "prefer full" in advice
    assert "selective stays available" in advice
