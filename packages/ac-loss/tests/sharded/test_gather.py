"""FSDP2 on two ranks (HSDP on four): every gradient against that of the unsharded mean over all labels of all ranks."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ac_loss import FusedLinearCrossEntropy, linear_cross_entropy
from ac_loss.sharded import add_loss_method

VOCAB, WIDTH, TOKENS = 51, 16, (2, 13)  # two ranks have 26 and 25 rows, four 13, 13, 13 and 12


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, logits: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.mix(self.embed(tokens)))
        return self.lm_head(hidden) if logits else hidden


def batch(size: int, ignored: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all ranks, ``[size, steps, *TOKENS]``; other numbers of labels count on each rank."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, size, 2, *TOKENS), generator=generator)
    labels[0, 0, 0, :9] = -100
    labels[1, 1, :, 2:5] = -100
    if ignored == "all of rank 0":
        labels[0] = -100
    return tokens, labels


def model_and_truth(tokens, labels, **kind):
    torch.manual_seed(0)
    model = Model(**kind).double()
    truth = copy.deepcopy(model)
    loss = F.cross_entropy(truth(tokens, logits=True).flatten(0, -2), labels.flatten())
    loss.backward()
    return model, loss.detach(), {name: p.grad for name, p in truth.named_parameters()}


def error(got: torch.Tensor, right: torch.Tensor) -> float:
    return ((got - right).norm() / right.norm()).item()


def train(
    rank,
    *,
    route,
    shape=(2,),
    names=("dp",),
    units=("lm_head", ""),
    reshard=None,
    reduction="sum",
    ignored="some",
    tied=False,
    bias=False,
):
    """The largest relative error of the loss and of any parameter's gradient."""
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    tokens, labels = batch(size, ignored)
    count = int((labels != -100).sum())
    model, right_loss, right = model_and_truth(tokens, labels, tied=tied, bias=bias)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for unit in units:
        fully_shard(model.get_submodule(unit), mesh=mesh, reshard_after_forward=reshard)
    factor, world = size, dist.group.WORLD
    if route == "summed":
        factor = 1
        for unit in units:
            model.get_submodule(unit).set_gradient_divide_factor(1.0)
    if route == "method":
        add_loss_method(model.lm_head, reduction=reduction)

    total = 0.0
    for step in range(2):
        hidden, here = model(tokens[rank, step], logits=route == "after logits"), labels[rank, step]
        if route == "after logits":
            hidden = model(tokens[rank, step])
        head, options = model.lm_head, {"reduction": reduction}
        if reduction != "none":
            options["num_label_tokens"] = count
        if route == "method":
            loss = head.loss(hidden, here, **options)
        elif route == "module":
            loss = FusedLinearCrossEntropy(reduction=reduction)(hidden, here, head.weight, count, world)
        elif route == "summed":
            loss = linear_cross_entropy(hidden, head.weight, here, head.bias, grad_reduce="sum", **options)
        else:
            group = world if route == "group" else None
            loss = linear_cross_entropy(hidden, head.weight, here, head.bias, grad_reduce_group=group, **options)
        loss = loss.sum() / count if reduction == "none" else loss
        (factor * loss).backward()
        total += loss.detach()
    dist.all_reduce(total)
    errors = {"loss": (total - right_loss).abs().item() / right_loss.item()}
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.dtype == parameter.dtype
        errors[name] = error(parameter.grad.full_tensor(), right[name])
    return max(errors.values()), errors


CASES = {
    "in a method of the head": {"route": "method"},
    "with the sharded weight": {"route": "weight"},
    "on a mesh without names": {"route": "group", "names": None},
    "in the guide's class": {"route": "module", "names": None},
    "summed instead of averaged": {"route": "summed"},
    "with a bias": {"route": "weight", "bias": True},
    "in a method, with a bias": {"route": "method", "bias": True},
    "after a forward of the head": {"route": "after logits", "reshard": True},
    "tied, in the root unit": {"route": "weight", "tied": True, "units": ("",)},
    "tied, in the root unit, resharded": {"route": "weight", "tied": True, "units": ("",), "reshard": True},
    "one rank without labels": {"route": "weight", "ignored": "all of rank 0"},
    "one rank without labels, in a method": {"route": "method", "ignored": "all of rank 0"},
    "one rank without labels, one loss a token": {"route": "weight", "ignored": "all of rank 0", "reduction": "none"},
    "one loss a token": {"route": "weight", "reduction": "none"},
    "one loss a token, in a method": {"route": "method", "reduction": "none"},
    "mean over num_label_tokens": {"route": "weight", "reduction": "mean"},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_global_mean(ranks, case):
    for worst, errors in ranks.run(train, **CASES[case]):
        assert worst < 1e-12, errors


@pytest.mark.parametrize("route", ["weight", "method", "module"])
def test_hybrid_sharding(four_ranks, route):
    results = four_ranks.run(train, route=route, shape=(2, 2), names=("dp_replicate", "dp_shard"))
    for worst, errors in results:
        assert worst < 1e-12, errors


# The way of the bytes ------------------------------------------------------------------------------------------------


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """Name, elements and dtype of what is communicated."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and not func._opname.startswith(("wait", "_wrap")):
            self.calls.append((func._opname, args[0].numel(), str(args[0].dtype)))
        return func(*args, **(kwargs or {}))


def communicate(rank, shape, names, grad_mode="auto"):
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    head = nn.Linear(WIDTH, 52, bias=False)
    torch.distributed.fsdp.fully_shard(head, mesh=mesh)
    hidden = torch.ones(5, WIDTH, dtype=torch.bfloat16)
    with Collectives() as forward:
        loss = linear_cross_entropy(hidden, head.weight, torch.arange(5), reduction="sum", grad_mode=grad_mode)
    with Collectives() as backward:
        loss.backward()
    return forward.calls, backward.calls


def test_the_weight_is_cast_before_it_is_gathered_and_its_gradient_reduced_in_its_own_dtype(ranks):
    for forward, backward in ranks.run(communicate, shape=(2,), names=("fsdp",)):
        assert forward == [("all_gather_into_tensor", 26 * WIDTH, "torch.bfloat16")]
        assert backward == [("reduce_scatter_tensor", 52 * WIDTH, "torch.float32")]


def test_a_recomputation_gathers_again(ranks):
    gathered = ("all_gather_into_tensor", 26 * WIDTH, "torch.bfloat16")
    for forward, backward in ranks.run(communicate, shape=(2,), names=("fsdp",), grad_mode="recompute"):
        assert forward == [gathered]
        assert backward == [gathered, ("reduce_scatter_tensor", 52 * WIDTH, "torch.float32")]


def test_replicas_are_reduced_when_the_gradient_is_a_shard(four_ranks):
    for forward, backward in four_ranks.run(communicate, shape=(2, 2), names=("dp_replicate", "dp_shard")):
        assert forward == [("all_gather_into_tensor", 26 * WIDTH, "torch.bfloat16")]
        assert backward == [
            ("reduce_scatter_tensor", 52 * WIDTH, "torch.float32"),
            ("all_reduce", 26 * WIDTH, "torch.float32"),
        ]


def mix_precisions(rank, autocast):
    """fp32 parameters, bf16 products: the sharded gradient, and that of each rank's bf16 weight summed in fp32."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCAB, WIDTH), torch.randn(2, 30, WIDTH)
    labels = torch.randint(0, VOCAB, (2, 30))
    labels[0, :11] = -100
    hidden = hidden if autocast else hidden.bfloat16()
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded = torch.distributed.tensor.distribute_tensor(weight, mesh, [torch.distributed.tensor.Shard(0)])
    sharded.requires_grad_()
    here = hidden[rank].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = linear_cross_entropy(here, sharded, labels[rank], num_label_tokens=49)
    (2 * loss).backward()
    assert here.grad.dtype == here.dtype
    right = torch.zeros_like(weight)
    for other in range(2):
        narrow = weight.bfloat16().requires_grad_()
        alone = linear_cross_entropy(hidden[other].bfloat16(), narrow, labels[other], num_label_tokens=49)
        (2 * alone).backward()
        right += narrow.grad.float() / 2
    assert sharded.grad.dtype == torch.float32
    return error(sharded.grad.full_tensor(), right)


@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_precision(ranks, autocast):
    assert max(ranks.run(mix_precisions, autocast=autocast)) < 1e-6


def follow_a_policy(rank):
    """The head's gradient by both routes under FSDP2's mixed precision, and its error."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    tokens, labels = batch(2, "some")
    count = int((labels != -100).sum())
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gradients = []
    for route in ("method", "weight"):
        model, _, right = model_and_truth(tokens, labels)
        model.float()
        for unit in (model.lm_head, model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        add_loss_method(model.lm_head, num_label_tokens=count)
        hidden = model(tokens[rank])
        assert hidden.dtype == torch.bfloat16
        if route == "method":
            loss = model.lm_head.loss(hidden, labels[rank])
        else:
            loss = linear_cross_entropy(hidden, model.lm_head.weight, labels[rank], num_label_tokens=count)
        (2 * loss).backward()
        gradients.append(model.lm_head.weight.grad.full_tensor())
        assert loss.dtype == gradients[-1].dtype == torch.float32
    return error(gradients[1], gradients[0]), error(gradients[1], right["lm_head.weight"])


def test_mixed_precision_policy(ranks):
    for between, wrong in ranks.run(follow_a_policy):
        assert between < 1e-6
        assert wrong < 1e-2


def lose_digits(rank):
    """The loss over 100001 tokens, told in all ways, and what is said to a policy that rounds it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, values = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
    for output_dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, VOCAB, bias=False)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output_dtype)
        fully_shard(head, mesh=mesh, mp_policy=policy)
        add_loss_method(head, reduction="sum")
        hidden, labels = torch.ones(5, WIDTH), torch.arange(5)
        if output_dtype is None:
            counts = (100001, torch.tensor(100001), torch.tensor(100001.0), torch.tensor(100001.0).double())
            values = [head.loss(hidden, labels, num_label_tokens=count).item() for count in counts]
    try:
        head.loss(hidden, labels)
    except ValueError as error:
        return values, str(error)


def test_a_policy_rounds_neither_the_number_of_labels_nor_the_loss(ranks):
    for values, said in ranks.run(lose_digits):
        assert len(set(values)) == 1
        assert said.startswith("loss: the FSDP2 unit of the head rounds the loss to torch.bfloat16, ")


def infer(rank):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB)
    torch.distributed.fsdp.fully_shard(head, mesh=mesh)
    losses = []
    for mode in (torch.no_grad, torch.inference_mode):
        for reduction in ("mean", "none"):
            with mode():
                loss = linear_cross_entropy(
                    torch.ones(5, WIDTH), head.weight, torch.arange(5), head.bias, reduction=reduction
                )
            losses.append(loss.mean().item())
    return losses


def test_without_gradients(ranks):
    for losses in ranks.run(infer):
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def keep(rank, reduction):
    """Tensors of the whole weight's size alive after the forward, and what a backward says to a changed weight."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    head = nn.Linear(WIDTH, 52, bias=False)
    torch.distributed.fsdp.fully_shard(head, mesh=mesh)
    hidden = torch.ones(5, WIDTH, requires_grad=True)
    loss = linear_cross_entropy(hidden, head.weight, torch.arange(5), reduction=reduction)
    gc.collect()
    whole = sum(t.numel() == 52 * WIDTH for t in gc.get_objects() if type(t) is torch.Tensor)
    with torch.no_grad():
        head.weight.add_(1.0)
    try:
        loss.sum().backward()
    except RuntimeError as stopped:
        return whole, str(stopped)
    return whole, None


def test_the_gathered_weight_goes_when_the_forward_ends(ranks):
    for whole, stopped in ranks.run(keep, reduction="none"):
        assert whole == 0
        assert "sharded weight has been modified by an inplace operation" in stopped
    for whole, stopped in ranks.run(keep, reduction="sum"):
        assert whole == 1  # its gradient
        assert stopped is None


def change(rank, name, tensor_parallel, **options):
    """What a backward says to an input that was changed since the forward."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp" if tensor_parallel else "dp",))
    inputs = {
        "weight": distribute_tensor(torch.ones(52, WIDTH), mesh, [Shard(0)]),
        "bias": distribute_tensor(torch.ones(52), mesh, [Shard(0)]),
        "hidden": torch.ones(5, WIDTH),
    }
    if tensor_parallel:
        inputs["hidden"] = distribute_tensor(inputs["hidden"], mesh, [Replicate()])
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    loss = linear_cross_entropy(**leaves, labels=torch.arange(5), **options).sum()
    with torch.no_grad():
        leaves[name].mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation since the forward"):
        loss.backward()


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"grad_mode": "recompute"}], ids=str)
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_changed_input_is_noticed(ranks, name, options):
    # By the hooks that keep a weight sharded: they switch autograd's own check off.
    if name != "bias":  # a gathered one is a copy
        ranks.run(change, name=name, tensor_parallel=False, **options)
    ranks.run(change, name=name, tensor_parallel=True, **options)


def freeze(rank, names):
    """A frozen weight needs nothing told, and its gradient no collective."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    weight, hidden, labels = torch.randn(VOCAB, WIDTH), torch.randn(9, WIDTH), torch.randint(0, VOCAB, (9,))
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=names)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    mine, truth = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = linear_cross_entropy(mine, sharded, labels)
    with Collectives() as backward:
        loss.backward()
    linear_cross_entropy(truth, weight, labels).backward()
    assert not backward.calls
    return torch.equal(mine.grad, truth.grad)


@pytest.mark.parametrize("names", [None, ("dp",)])
def test_a_frozen_weight(ranks, names):
    assert ranks.run(freeze, names=names) == [True, True]


# Why all this ---------------------------------------------------------------------------------------------------------


def gather_naively(rank):
    tokens, labels = batch(2, "some")
    model, _, right = model_and_truth(tokens, labels)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.distributed.fsdp.fully_shard(model.lm_head, mesh=mesh)
    hidden, count = model(tokens[rank]), int((labels != -100).sum())
    whole = model.lm_head.weight.full_tensor()
    (2 * linear_cross_entropy(hidden, whole, labels[rank], num_label_tokens=count)).backward()
    return error(model.lm_head.weight.grad.full_tensor(), right["lm_head.weight"])


def test_full_tensor_is_still_wrong(ranks):
    # If torch ever changes this, the note in gather.py and the README's warning go.
    assert min(ranks.run(gather_naively)) > 0.1
