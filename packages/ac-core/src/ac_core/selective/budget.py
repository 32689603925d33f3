"""Which matmul outputs to keep where `save` leaves it to the policy.

The usual rule keeps attention and the output of every second matmul, whichever that is. Its memory is a sensible
amount; its choice is not: of seven linear layers of a Llama block it keeps the last, which no recompute needs. Here the
same number of bytes is spent where it saves most: the output with the most FLOPs a byte first, none that is not needed,
and what one block leaves over goes to the next.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Candidate(Generic[K]):
    """A matmul of a block.

    nbytes: of its output. intensity: FLOPs that keeping saves, a byte. needed: whether the recompute uses the output.
    preferred: taken first among equals.
    """

    key: K
    nbytes: float
    intensity: float
    needed: bool = True
    preferred: bool = False


def spend(blocks: Sequence[Sequence[Candidate[K]]]) -> list[frozenset[K]]:
    """The keys to keep, block by block, of candidates in the order of their calls.

    At no block do the bytes kept so far exceed those of every second matmul so far, the first of a block included.
    """
    chosen = []
    left = 0.0
    for candidates in blocks:
        left += sum(candidate.nbytes for candidate in candidates[::2])
        kept = set()
        for candidate in sorted(candidates, key=lambda c: (-c.intensity, not c.preferred)):
            if candidate.needed and candidate.nbytes <= left:
                kept.add(candidate.key)
                left -= candidate.nbytes
        chosen.append(frozenset(kept))
    return chosen
