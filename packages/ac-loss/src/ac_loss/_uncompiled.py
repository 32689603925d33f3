"""The loss under ``torch.compile``: one graph break around it, and none of it traced.

A module of its own, imported only while compiling: ``torch.compiler.disable`` loads the compiler, and that takes as
long as loading torch itself.
"""

import torch

from ac_loss import _functional, _statistics

_REASON = "ac_loss drops ignored tokens, and how many there are is known only at run time"

compute = torch.compiler.disable(_functional.compute, reason=_REASON)
compute_statistics = torch.compiler.disable(_statistics.compute, reason=_REASON)
