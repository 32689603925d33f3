"""The last product of an expert, which a recompute under `moe_tail` goes without."""

import torch

from ac_moe.cache.region import PROJECTION, Phase, Site, active, claim
from ac_moe.cache.tail import mark, numbers
from ac_moe.experts.product import Product

_SITE = Site("down_projection")  # of all layers: a region counts its down projections through


@torch.compiler.disable(reason="the recompute takes what the forward noted, by region and call")
def down_projection(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, padded: bool | None = None
) -> torch.Tensor:
    """`grouped_mm(rows, weight, offsets)`, of which a recompute under `moe_tail` makes the autograd node alone.

    Under `moe_tail` only a dispatcher's `combine` may read the result; see NOTE [ The only reader ] in
    `ac_moe.cache.tail`. In the recompute, if the forward gave it to a combine, it is a placeholder without values.

    Args, Returns: as of `grouped_mm`.

    Raises:
        ValueError: as `grouped_mm`.
        MoETailError: raised by whatever else reads the result.
    """
    product = Product(rows, weight, offsets, padded)
    if not any(active(phase, "moe_tail") for phase in Phase):
        return product()
    claimed = claim(_SITE, PROJECTION)
    number, skip = next(numbers), False
    if claimed.kept is None:
        claimed.keep(number)
    else:
        number = claimed.kept.value
        skip = number in claimed.source.combined
        claimed.pass_on()
    output = product(skip=skip, hide=True)
    return mark(output, number, skip) if skip or claimed.keepers else output
