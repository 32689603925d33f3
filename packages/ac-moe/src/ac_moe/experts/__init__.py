"""Products of rows with their experts' weights.

gate, up = experts.grouped_mm(rows, weight_in, offsets).chunk(2, -1)
rows = experts.down_projection(silu(gate) * up * weights[:, None], weight_down, offsets)
"""

from ac_moe.experts.down import down_projection
from ac_moe.experts.product import grouped_mm

__all__ = ["down_projection", "grouped_mm"]
