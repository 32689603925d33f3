import ast
import pathlib
import subprocess
import sys

import pytest

import ac_loss

SOURCE = pathlib.Path(ac_loss.__file__).parent


@pytest.mark.parametrize("module", ["ac_loss", "ac_loss.config"])
def test_importing_does_not_import_torch(module):
    code = f"import sys, {module}; ac_loss.LossConfig(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_using_the_loss_does_not_import_the_compiler_or_distributed_tensors():
    code = (
        "import sys, torch, ac_loss; before = set(sys.modules); h = torch.ones(2, 3, requires_grad=True); "
        "ac_loss.linear_cross_entropy(h, torch.ones(4, 3), torch.tensor([1, 2])).backward(); "
        "print(sorted({'torch._dynamo', 'torch.distributed.tensor'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names():
    names = {"FusedLinearCrossEntropy", "LossConfig", "TokenStatistics", "linear_cross_entropy", "token_statistics"}
    names |= {"Explanation", "explain", "remove_fused_loss", "use_fused_loss"}
    assert names <= set(ac_loss.__all__)
    assert all(callable(getattr(ac_loss, name)) for name in ac_loss.__all__)
    assert {*ac_loss.__all__, "reference", "config", "sharded", "__version__"} <= set(dir(ac_loss))
    assert ac_loss.sharded.add_loss_method.__module__ == "ac_loss.sharded.method"
    assert ac_loss.reference.linear_cross_entropy.__module__ == "ac_loss.reference"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ac_loss' has no attribute 'cross_entropy'"):
        ac_loss.cross_entropy  # noqa: B018


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_torch_and_the_standard_library(path):
    """And, where a backend is asked to compute, its own library."""
    optional = {"triton", "liger_kernel", "cut_cross_entropy"} if "backends" in path.parts else set()
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module.split(".")[0])
    assert roots - set(sys.stdlib_module_names) <= {"torch", "ac_loss", *optional}
