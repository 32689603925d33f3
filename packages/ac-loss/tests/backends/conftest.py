"""What the tests of the backends share. Without a GPU, triton's kernels run in its interpreter."""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined: before anything imports one

from ac_loss._objective import Objective
from ac_loss.backends import Request
from ac_loss.backends.triton_backend import layout

NEEDS = {
    "torch": (),
    "native": (),
    "triton": ("triton",),
    "liger": ("liger_kernel", "triton"),
    "cce": ("cut_cross_entropy", "triton"),
}


MISSING = {name for name, modules in NEEDS.items() if not all(map(importlib.util.find_spec, modules))}


@pytest.fixture(params=[name for name in NEEDS if name not in MISSING])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend whose libraries are there."""
    if request.param == "cce":
        torch._dynamo.reset()  # it compiles with fullgraph=True, and the ninth variant is an error
    return request.param


@pytest.fixture(scope="session")
def tested_backends() -> set[str]:
    """Those that the fixture ``backend`` goes through; skips the test that asks where some cannot be tested."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(sorted(MISSING))}; hatch run kernels:test has them")
    return set(NEEDS)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 x 16, several splits of the vocabulary, a few of its tiles at a time in the backward."""
    for name, value in {
        "BLOCK_ROWS": 16,
        "BLOCK_COLUMNS": 16,
        "BLOCK_WIDTH_BYTES": 64,
        "PROGRAMS": 9,
        "LEAST_COLUMNS": 16,
        "MOST_COLUMNS": 32,
        "ROWS_WITHOUT_WEIGHT": 20,
    }.items():
        monkeypatch.setattr(layout, name, value)


@pytest.fixture
def ask() -> Callable[..., Request]:
    return _ask


def _ask(dtype: torch.dtype = torch.float32, device: str = "cpu", **facts: object) -> Request:
    """A call of 1000 tokens; options of the objective and other facts by name."""
    options = {k: facts.pop(k) for k in ("logit_scale", "softcap", "label_smoothing", "z_loss") if k in facts}
    given = {"tokens": 1000, "counted": 1000, "hidden_size": 64, "vocab": 8001, "gemm_dtype": dtype} | facts
    return Request(
        hidden_dtype=facts.get("hidden_dtype", dtype),
        weight_dtype=facts.get("weight_dtype", dtype),
        device=torch.device(device),
        objective=Objective(**options),
        **{k: v for k, v in given.items() if k not in ("hidden_dtype", "weight_dtype")},
    )
