"""Which experts tokens go to, where no weights say it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """What is assumed of a router.

    ranks: share the experts out, consecutive equal parts. load: of the rows that an even routing would give to the
    experts of the first rank, how many they are given; the others share the rest.

    Raises:
        ValueError: of `load`, which is less than 1 or more than all rows.
    """

    ranks: int = 1
    load: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.load, int | float) and not isinstance(self.load, bool)
        if not number or not 1 <= self.load <= self.ranks:
            raise ValueError(
                f"expert_load: {self.load!r} is no number from 1, an even share, to {self.ranks}, all rows of the "
                f"{self.ranks} ranks of ep_size"
            )

    def choose(self, shape: torch.Size, experts: int) -> Tensor:
        """int64 `[..., top_k]`: different experts for each token, and a recompute gets those of its forward.

        Raises:
            ValueError: `load` is more than can be had, for a token needs more experts than the first rank has.
        """
        tokens, top_k = shape[:-1].numel(), shape[-1]
        chosen = _even(tokens, top_k, experts)
        extra = round((self.load - 1) * tokens * top_k / self.ranks)
        return _loaded(chosen, extra, experts // self.ranks).view(shape)


def _even(tokens: int, top_k: int, experts: int) -> Tensor:
    """Each expert as often as any other, up to the last few tokens.

    Any two meet in a token as often as chance would have it, which says how many ranks a token travels to: of as many
    tokens as there are experts, each gets the same pattern of distances, one further on; the next ones another.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(-(-tokens // experts), experts, generator=generator).argsort(-1)[:, None, :top_k]
    return ((patterns + torch.arange(experts)[:, None]) % experts).flatten(0, 1)[:tokens]


def _loaded(chosen: Tensor, extra: int, first: int) -> Tensor:
    """`chosen`, with `extra` choices moved to one of the `first` experts, evenly over the tokens."""
    while extra:
        here = chosen < first
        able = (~here.all(-1) & (here.sum(-1) < first)).nonzero().flatten()
        if not len(able):
            raise ValueError(
                f"expert_load: the {first} experts of a rank cannot get so many rows, for a token goes to each of them "
                "once; give less"
            )
        moved = able[torch.linspace(0, len(able) - 1, min(extra, len(able))).long()]
        extra -= len(moved)
        free = torch.ones(len(moved), first + 1, dtype=torch.bool).scatter_(1, chosen[moved].clamp(max=first), False)
        free = free[:, :first]
        turn = torch.arange(len(moved)) % free.sum(-1) + 1
        chosen[moved, here[moved].long().argmin(-1)] = ((free.cumsum(-1) == turn[:, None]) & free).long().argmax(-1)
    return chosen
