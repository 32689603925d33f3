"""The reference under the name that Megatron-core and others import, where DeepEP is not installed."""

import importlib.machinery
import importlib.util
import sys
import types
from types import TracebackType

from ac_moe.reference.buffer import HybridEPBuffer

_MEGATRON = "megatron.core.transformer.moe.fused_a2a"


class Installation:
    """The time during which `deep_ep` is the reference: a context, or until `uninstall`."""

    def __init__(self, module: types.ModuleType | None) -> None:
        self._module = module

    def uninstall(self) -> None:
        """Takes the module away. Who has imported from it keeps what it imported."""
        if self._module is not None and sys.modules.get("deep_ep") is self._module:
            del sys.modules["deep_ep"]
        self._module = None

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()


def install() -> Installation:
    """Makes `import deep_ep` give the reference in this process: for tests, and for runs on the CPU.

        with ac_moe.reference.install():
            from megatron.core.transformer.moe.moe_layer import MoELayer

    Inside another installation it adds nothing, and the outer one decides when it ends.

    Raises:
        RuntimeError: DeepEP is installed (it is never shadowed), or Megatron-core has looked for it before.
    """
    present = sys.modules.get("deep_ep")
    if present is not None and getattr(present, "HybridEPBuffer", None) is HybridEPBuffer:
        return Installation(None)
    if present is not None or importlib.util.find_spec("deep_ep") is not None:
        raise RuntimeError(
            "deep_ep: DeepEP is installed, and the reference does not take its place. To use the reference in spite "
            "of that, give it to the dispatcher: HybridEPDispatcher(..., buffer=ac_moe.reference.HybridEPBuffer)."
        )
    megatron = sys.modules.get(_MEGATRON)
    if megatron is not None and not megatron.HAVE_HYBRIDEP:
        raise RuntimeError(
            f"{_MEGATRON} was imported before and has found no deep_ep. Call ac_moe.reference.install() before the "
            "first import of Megatron's MoE layers."
        )
    module = types.ModuleType("deep_ep", "ac_moe.reference under the name of DeepEP.")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    module.HybridEPBuffer = HybridEPBuffer
    sys.modules["deep_ep"] = module
    return Installation(module)
