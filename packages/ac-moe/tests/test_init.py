import subprocess
import sys

import pytest

import ac_moe

HEAVY = ("torch", "megatron", "numpy", "transformers")


def loaded_by(code: str) -> list[str]:
    code = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import ac_moe",
        "import ac_moe.config; ac_moe.config.MoEConfig()",
        "from ac_moe import MoEConfig; MoEConfig()",
        "import ac_moe; ac_moe.stats()",
        "import ac_moe; dir(ac_moe), ac_moe.__version__, ac_moe.config",
        "import ac_moe.megatron; dir(ac_moe.megatron)",
    ],
)
def test_import_is_light(code: str) -> None:
    assert loaded_by(code) == []


def test_torch_comes_with_the_first_name_that_needs_it() -> None:
    loaded = loaded_by("from ac_moe import *")
    assert "torch" in loaded
    assert "megatron" not in loaded


def test_facade() -> None:
    assert ac_moe.__version__ == "0.1.0"
    assert ac_moe.__all__ == [
        "AllToAllDispatcher",
        "Dispatched",
        "ExpertParallel",
        "HybridEPDispatcher",
        "MoEConfig",
        "MoETailError",
        "RecomputeCacheError",
        "RecomputeRoutingMismatchError",
        "Stats",
        "__version__",
        "context_fn",
        "experts",
        "megatron",
        "parallelize",
        "reference",
        "reset_stats",
        "routing",
        "stats",
        "wrap_reentrant",
    ]
    assert set(ac_moe.__all__) <= set(dir(ac_moe))
    for name in ac_moe.__all__:
        assert getattr(ac_moe, name) is not None
    assert ac_moe.errors.RecomputeCacheError is ac_moe.RecomputeCacheError


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'ac_moe' has no attribute 'moe_tail'"):
        _ = ac_moe.moe_tail
