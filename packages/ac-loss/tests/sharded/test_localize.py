"""FSDP2 and tensor parallelism together on four ranks, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ac_loss import linear_cross_entropy
from ac_loss.sharded import add_loss_method

VOCAB, WIDTH, TOKENS = 51, 16, (2, 12)  # 26 and 25 rows over tensor-parallel ranks, then 13, 13, 13 and 12


class Model(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.embed(tokens)))


def train(rank, *, route, shape=(2, 2), names=("dp", "tp"), reduction="sum", bias=False, hidden_as="plain"):
    """Relative errors of the loss and of every gradient; the ranks of one data-parallel place have the same tokens."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    data, replicas, place = mesh[names[:-1]], 4 // shape[-1], rank // shape[-1]
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, replicas, *TOKENS), generator=generator)
    labels[0, 0, :9] = -100
    count = int((labels != -100).sum())

    torch.manual_seed(0)
    model = Model(bias).double()
    truth = copy.deepcopy(model)
    right_loss = F.cross_entropy(truth.lm_head(truth(tokens)).flatten(0, -2), labels.flatten())
    right_loss.backward()

    parallelize_module(model.lm_head, mesh[names[-1]], ColwiseParallel())
    fully_shard(model.lm_head, mesh=data)
    fully_shard(model, mesh=data)
    if route == "method":
        add_loss_method(model.lm_head, reduction=reduction)
    hidden, here, head = model(tokens[place]), labels[place], model.lm_head
    if hidden_as == "sequence parallel":
        hidden = DTensor.from_local(hidden, mesh[names[-1]], [Replicate()]).redistribute(placements=[Shard(1)])
    options = {} if reduction == "none" else {"num_label_tokens": count}
    if route == "method":
        loss = head.loss(hidden, here, **options)
    else:
        if route == "groups":
            options["grad_reduce_group"] = data.get_group()
            options["vocab_parallel_group"] = mesh.get_group(names[-1])
        loss = linear_cross_entropy(hidden, head.weight, here, head.bias, reduction=reduction, **options)
    loss = loss.sum() / count if reduction == "none" else loss
    (replicas * loss).backward()

    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = {"loss": (total / shape[-1] - right_loss).abs().item() / right_loss.item()}
    for (name, parameter), other in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.grad.placements == parameter.placements
        errors[name] = ((parameter.grad.full_tensor() - other.grad).norm() / other.grad.norm()).item()
    return errors


CASES = {
    "in a method of the head": {"route": "method"},
    "with the sharded weight": {"route": "weight"},
    "with the sharded weight, groups told": {"route": "groups", "names": ("outer", "inner")},
    "with a bias": {"route": "weight", "bias": True},
    "in a method, with a bias": {"route": "method", "bias": True},
    "one loss a token": {"route": "weight", "reduction": "none"},
    "one loss a token, in a method": {"route": "method", "reduction": "none"},
    "sequence parallel": {"route": "weight", "hidden_as": "sequence parallel"},
    "hybrid sharding": {"route": "weight", "shape": (2, 1, 2), "names": ("dp_replicate", "dp_shard", "tp")},
}


@pytest.mark.parametrize("case", CASES)
def test_fsdp_and_tensor_parallel(four_ranks, case):
    for errors in four_ranks.run(train, **CASES[case]):
        assert max(errors.values()) < 1e-12, errors


# Refused -------------------------------------------------------------------------------------------------------------


def refused(rank, *, names=("dp",), shape=(2,), weight=(0,), bias=None, hidden=None, labels=None, groups=None, size=8):
    """What is said on this rank. Placements: a number for ``Shard``, ``"r"``, ``"p"``, None for a plain tensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)

    def placed(tensor, placements):
        if placements is None:
            return tensor
        known = {"r": Replicate(), "p": Partial()}
        lies = [known.get(p) or Shard(p) for p in placements]
        return DTensor.from_local(tensor, mesh, lies, run_check=False).requires_grad_(tensor.is_floating_point())

    arguments = {
        "hidden": placed(torch.ones(2, 4, size), hidden),
        "weight": placed(torch.ones(6, 8), weight),
        "labels": placed(torch.zeros(2, 4, dtype=torch.int64), labels),
        "bias": None if bias is None else placed(torch.ones(6), None if bias == "plain" else bias),
    }
    given = {"world": dist.group.WORLD, "text": "dp"}
    given |= {"other mesh": dist.new_group([rank], use_local_synchronization=True)}
    groups = {argument: given[group] for argument, group in (groups or {}).items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        linear_cross_entropy(**arguments, **groups)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "start"),
    [
        (
            {"names": None},
            "weight: is a DTensor over dimension 0 of its mesh (without a name), and nothing tells whether those 2 "
            "ranks hold different tokens (FSDP: the weight is gathered and its gradient reduced) or the same tokens "
            "and different rows of the vocabulary (tensor parallelism: the weight stays sharded). Either name the "
            "mesh's dimensions, init_device_mesh(..., mesh_dim_names=('dp',)) or ('tp',), or pass the group of those "
            "ranks as grad_reduce_group or as vocab_parallel_group.",
        ),
        ({"names": ("x",)}, "weight: is a DTensor over dimension 0 of its mesh ('x'), and nothing tells whether"),
        ({"names": ("x",), "weight": ("r",)}, "weight: is a DTensor over dimension 0 of its mesh ('x'), and nothing"),
        (
            {"names": ("tp",), "weight": (1,)},
            "weight: is S(1) over dimension 0 of its mesh ('tp'), and over ranks with the same tokens only",
        ),
        ({"weight": ("p",)}, "weight: is P(sum) over dimension 0 of its mesh ('dp'), an incomplete sum; reduce it"),
        (
            {"names": ("tp", "tensor"), "shape": (2, 1), "weight": (0, 0), "groups": {"grad_reduce_group": "world"}},
            "grad_reduce_group: covers dimension 0 of its mesh ('tp'), which is tensor parallel by its name; ranks ho",
        ),
        ({"bias": "plain"}, "bias: is a plain tensor, and weight is a DTensor on DeviceMesh("),
        ({"weight": None, "bias": (0,)}, "bias: is a DTensor (placements (Shard(dim=0),)) and weight is a plain tens"),
        (
            {"names": ("tp",), "bias": ("r",)},
            "bias: has placements (Replicate(),) and weight (Shard(dim=0),); over tensor-parallel ranks both must be",
        ),
        (
            {"names": ("tp",), "weight": ("r",), "groups": {"vocab_parallel_group": "world"}},
            "vocab_parallel_group: weight has placements (Replicate(),), so the ranks [0, 1] of the group all have al",
        ),
        (
            {"hidden": ("r",)},
            "hidden: is R over dimension 0 of its mesh ('dp'), whose ranks must hold different tokens for the gradient",
        ),
        ({"hidden": (2,)}, "hidden: is S(2) over dimension 0 of its mesh ('dp'), whose ranks must hold different tok"),
        ({"labels": ("r",)}, "labels: is R over dimension 0 of its mesh ('dp'), whose ranks must hold different tok"),
        ({"names": ("x",), "weight": None, "hidden": ("r",)}, "hidden: is a DTensor over dimension 0 of its mesh ('x"),
        ({"groups": {"grad_reduce_group": "text"}}, "grad_reduce_group: a torch.distributed.ProcessGroup is needed, g"),
        ({"size": 7}, "hidden: must be [..., 8] to fit weight [12, 8], got [2, 4, 7]; pass the input of lm_head"),
    ],
    ids=str,
)
def test_wrong_layouts_are_refused(ranks, case, start):
    for said in ranks.run(refused, **case):
        assert said.startswith(start)


def lie_on_another_mesh(rank):
    """Hidden over the one dimension, the vocabulary over the other, both tensor parallel by their names."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "tp"))
    hidden = DTensor.from_local(torch.ones(2, 4, 8), mesh["tensor"], [Replicate()], run_check=False)
    weight = DTensor.from_local(torch.ones(6, 8), mesh["tp"], [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="hidden: lies over") as caught:
        linear_cross_entropy(hidden, weight, torch.zeros(2, 4, dtype=torch.int64))
    both = DTensor.from_local(torch.ones(6, 8), mesh, [Shard(0), Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="two tensor-parallel dimensions, 0 and 1"):
        linear_cross_entropy(torch.ones(2, 4, 8), both, torch.zeros(2, 4, dtype=torch.int64))
    return str(caught.value)


def test_two_tensor_parallel_dimensions(four_ranks):
    said = four_ranks.run(lie_on_another_mesh)[0]
    assert said.startswith(
        "hidden: lies over dimension 0 of its mesh ('tensor'), ranks [0, 2], and the vocabulary is sharded over ranks "
        "[0, 1]; both must be the same tensor-parallel ranks"
    )


def ignore_groups(rank):
    """A plain weight belongs to whoever holds it: its group changes nothing, nor does a vocabulary on one rank."""
    torch.manual_seed(rank)
    hidden, weight, labels = torch.randn(5, 8), torch.randn(6, 8, requires_grad=True), torch.randint(0, 6, (5,))
    losses = []
    alone = dist.new_group([rank], use_local_synchronization=True)
    for groups in ({}, {"grad_reduce_group": dist.group.WORLD}, {"vocab_parallel_group": alone}):
        loss = linear_cross_entropy(hidden, weight, labels, **groups)
        losses.append([loss.item(), *torch.autograd.grad(loss, weight)[0].flatten().tolist()])
    return losses


def test_a_plain_weight_is_left_to_its_owner(ranks):
    for losses in ranks.run(ignore_groups):
        assert losses[0] == losses[1] == losses[2]
