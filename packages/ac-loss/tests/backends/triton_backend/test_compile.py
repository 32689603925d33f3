"""The kernels compiled to machine code for GPUs that need not be there."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ac_loss.backends.triton_backend import kernels, layout

capability = int(sys.argv[1])
flags = {"HAS_BIAS": True, "HAS_SOFTCAP": True, "HAS_SUMS": True, "EVEN": True, "UPCAST": False,
         "GROUP": layout.GROUP,
         "BLOCK_ROWS": layout.BLOCK_ROWS, "BLOCK_COLUMNS": layout.BLOCK_COLUMNS,
         "BLOCK_WIDTH": layout.block_width(2048, 2), "hidden_stride": 1, "weight_stride": 1}
floats = {"logit_scale", "softcap", "label_share", "other_share"}
integers = {"tokens", "vocab", "tiles", "first", "last", "hidden_size"}
narrow = {"hidden", "weight", "bias", "out"}

def kind(name):
    if name in flags: return "constexpr"
    if name in narrow: return "*bf16"
    if name == "labels": return "*i64"
    return "fp32" if name in floats else "i32" if name in integers or name.endswith("stride") else "*fp32"

for kernel in (kernels.softmax_statistics, kernels.logit_gradients):
    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, k) in enumerate(signature.items())
               if k[0] == "*" or name.endswith("row_stride") or name == "hidden_size"}
    constants = {(i,): flags[name] for i, name in enumerate(signature) if name in flags}
    built = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
                           target=GPUTarget("cuda", capability, 32),
                           options={"num_warps": layout.WARPS, "num_stages": layout.STAGES})
    ptx = built.asm["ptx"]
    print(kernel.__name__, built.metadata.shared, "mma" in ptx, len(built.asm["cubin"]) > 0, "atom" in ptx)
"""


@pytest.mark.parametrize(("capability", "shared"), [(80, 163 * 1024), (90, 227 * 1024)])
def test_they_compile_for_tensor_cores_and_fit(capability, shared):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["softmax_statistics", "logit_gradients"]
    for _, bytes_shared, tensor_cores, machine_code, atomics in lines:
        assert int(bytes_shared) <= shared
        assert (tensor_cores, machine_code, atomics) == ("True", "True", "False")
