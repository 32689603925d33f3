"""HybridEP without its GPU kernels: the same interface and semantics, in plain `torch.distributed`, on any device."""

from ac_moe.reference.buffer import HybridEPBuffer
from ac_moe.reference.publish import install

__all__ = ["HybridEPBuffer", "install"]
