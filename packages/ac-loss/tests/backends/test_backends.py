import importlib.util
import subprocess
import sys

import pytest
import torch

from ac_loss import FusedLinearCrossEntropy, backends, linear_cross_entropy
from ac_loss.backends import native, triton_backend


@pytest.fixture
def nothing_installed(monkeypatch):
    """loss-19: no triton, no liger_kernel, no cut_cross_entropy."""
    missing = ("triton", "liger_kernel", "cut_cross_entropy")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else real(name, *rest))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("name", backends.NAMES)
def test_every_backend_has_the_same_face(name, ask):
    backend = backends.load(name)
    assert name == backend.NAME
    assert backend.OPT_IN is None or name in ("liger", "cce", "native")
    assert all(isinstance(reason, str) for reason in backend.objections(ask()))
    assert backend.extra_bytes(ask()) > 0
    assert backend.extra_bytes(ask(counted=0)) < 2**20
    assert callable(backend.run)


def test_loading_a_backend_loads_none_of_its_libraries():
    code = (
        "import sys; from ac_loss import backends; [backends.load(name) for name in backends.NAMES]; "
        "print(sorted({'triton', 'liger_kernel', 'cut_cross_entropy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


@pytest.mark.usefixtures("nothing_installed")
def test_on_a_bare_cpu_auto_is_torch(ask):
    assert backends.choose(ask(), "auto") == "torch"


@pytest.mark.usefixtures("nothing_installed")
def test_a_gpu_without_triton_gets_torch(ask):
    assert backends.choose(ask(torch.bfloat16, "cuda"), "auto") == "torch"


def test_auto_on_a_gpu_is_triton_where_it_can(ask, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # asked from a machine without one
    assert backends.choose(ask(torch.bfloat16, "cuda"), "auto") == "triton"
    assert backends.choose(ask(torch.bfloat16, "cuda", grad_mode="forward"), "auto") == "torch"
    assert backends.choose(ask(torch.float64, "cuda"), "auto") == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert backends.choose(ask(torch.float16, "cuda"), "auto") == "torch"


def test_auto_on_a_cpu_is_torch_even_if_triton_could_be_interpreted(ask, monkeypatch):
    monkeypatch.setattr(triton_backend, "objections", lambda request: [])
    assert backends.choose(ask(), "auto") == "torch"


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("triton", ["pip install 'ac-loss[triton]'", "kernels are for NVIDIA GPUs, and the tensors are on cpu"]),
        ("liger", ["liger_kernel and triton not installed: pip install 'ac-loss[liger]'", "kernels are for GPUs"]),
        ("cce", ["cut_cross_entropy and triton not installed: pip install 'ac-loss[cce]'", "no label_smoothing"]),
        ("native", ["label_smoothing"]),
    ],
)
def test_a_named_backend_that_cannot_is_an_error_with_every_reason(draw, recorder, name, reasons):
    inputs = draw(6, 11, 8, dtype=torch.float32)
    del inputs["bias"]
    with recorder, pytest.raises(ValueError, match=f"^backend: '{name}' cannot compute this call:") as caught:
        linear_cross_entropy(**inputs, label_smoothing=0.1, backend=name)
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if line.startswith("  - ")]) == len(reasons)
    assert all(any(reason in line for line in lines) for reason in reasons)
    assert lines[-1] == "or use backend='auto'"
    assert recorder.products == []


def test_the_named_backend_is_the_one_that_runs(draw, monkeypatch):
    inputs = draw(6, 11, 8, dtype=torch.float32)
    ran = []
    monkeypatch.setattr(native, "objections", lambda request: [])
    monkeypatch.setattr(native, "run", lambda *args, **rest: ran.append(rest) or torch.tensor(3.0))
    loss_fn = FusedLinearCrossEntropy(backend="native")
    assert loss_fn(inputs["hidden"], inputs["labels"], inputs["weight"]).item() == 3.0
    assert ran == [{"reduction": "sum"}]


def test_a_request_knows_which_gradients_are_wanted(draw, monkeypatch):
    inputs = draw(6, 11, 8, dtype=torch.float32)
    seen = []
    monkeypatch.setattr(backends, "choose", lambda request, name: seen.append(request) or "torch")
    linear_cross_entropy(inputs["hidden"].requires_grad_(), inputs["weight"], inputs["labels"], inputs["bias"])
    with torch.no_grad():
        linear_cross_entropy(**inputs)
    first, second = seen
    assert (first.grad_hidden, first.grad_weight, first.grad_bias, first.differentiated) == (True, False, False, True)
    assert not second.differentiated
    assert (first.tokens, first.counted) == (6, int((inputs["labels"] != -100).sum()))
    assert (first.vocab, first.hidden_size, first.bias_dtype) == (11, 8, torch.float32)


def test_rows_of_a_vocabulary_that_others_share_are_for_torch_alone(ask, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shard = ask(torch.bfloat16, "cuda", shard=True)
    assert backends.choose(shard, "auto") == "torch"
    for name in backends.NAMES[1:]:
        with pytest.raises(ValueError, match="rows of the vocabulary that other ranks hold"):
            backends.choose(shard, name)
