import pytest
import torch.distributed as dist

from ac_loss.sharded.mesh import mesh_roles, role_of_name


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, "data") for name in ("dp", "dp0", "fsdp", "dp_shard", "dp_replicate", "dp_shard_cp", "dp_cp", "cp")),
        *((name, "data") for name in ("data_parallel", "DP", "batch", "hsdp", "replicate", "shard")),
        *((name, "tensor") for name in ("tp", "TP", "tensor", "tensor_parallel", "tensor_model_parallel")),
        *((name, None) for name in ("dp_tp", "model", "pp", "ep", "x", "0", "", "sp", "dim_0")),
    ],
)
def test_names(name, role):
    assert role_of_name(name) == role


def roles(rank, shape, names, data=None, tensor=None):
    """Roles on a mesh of four ranks, or what is said against the groups, given as lists of lists of ranks."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)

    def group(partition):
        made = [dist.new_group(ranks) for ranks in partition or ()]
        return next((g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER), None)

    groups = {"data_group": group(data), "tensor_group": group(tensor)}
    try:
        return mesh_roles(mesh, **groups)
    except ValueError as refused:
        return str(refused)


ROWS, COLUMNS, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"shape": (2, 2), "names": ("dp", "tp")}, ("data", "tensor")),
        ({"shape": (2, 2), "names": None}, (None, None)),
        ({"shape": (2, 2), "names": None, "data": COLUMNS}, ("data", None)),
        ({"shape": (2, 2), "names": None, "data": COLUMNS, "tensor": ROWS}, ("data", "tensor")),
        ({"shape": (2, 2), "names": ("a", "b"), "data": ALL}, ("data", "data")),
        ({"shape": (2, 2), "names": ("dp", "x"), "tensor": ROWS}, ("data", "tensor")),
        ({"shape": (2, 2), "names": ("dp_replicate", "dp_shard"), "data": ALL}, ("data", "data")),
        ({"shape": (4, 1), "names": ("dp", "tp"), "data": ALL}, ("data", "tensor")),
    ],
)
def test_names_and_groups_tell(four_ranks, arguments, right):
    assert four_ranks.run(roles, **arguments) == [right] * 4


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (
            {"shape": (2, 2), "names": ("dp", "tp"), "data": ALL},
            "grad_reduce_group: covers dimension 1 of its mesh ('tp'), which is tensor parallel by its name; ranks ho",
        ),
        (
            {"shape": (2, 2), "names": None, "data": ROWS, "tensor": ROWS},
            "vocab_parallel_group: covers dimension 1 of its mesh (without a name), which grad_reduce_group covers to",
        ),
        (
            {"shape": (2, 2), "names": ("dp_replicate", "dp_shard"), "data": ROWS},
            "grad_reduce_group: its ranks [0, 1] leave out dimension 0 of its mesh ('dp_replicate'), which is data pa",
        ),
        (
            {"shape": (4,), "names": ("dp",), "data": ROWS},
            "grad_reduce_group: its ranks are [0, 1] and the tensor lies over a mesh of shape (4,) with ranks [0, 1,",
        ),
    ],
)
def test_contradictions(four_ranks, arguments, start):
    assert four_ranks.run(roles, **arguments)[0].startswith(start)


def apart(rank):
    """A mesh of this rank's row; a group of this rank's column has no say in it."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh_roles(mesh["tp"], data_group=mesh.get_group("dp"), tensor_group=None)


def test_a_group_across_the_mesh_has_no_say(four_ranks):
    assert four_ranks.run(apart) == [("tensor",)] * 4
