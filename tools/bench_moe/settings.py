"""What is run: the sizes of the model, the ranks, the variants of the layer."""

from dataclasses import dataclass, fields
from typing import Any

DISPATCHERS = ("alltoall", "hybridep")
FORMS = {"gated": "x + gate * moe(norm(x))", "plain sum": "x + moe(norm(x))"}
"""What a layer computes. Of the first, backward needs what the combine returns; of the second nothing after it."""
DTYPES = ("float32", "bfloat16")
BUFFERS = ("reference", "deep_ep")
FEWEST_ROUNDS = 5
_ALIGNMENT = 16  # bytes, of torch's grouped GEMM


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model. `tokens` are those of each rank and microbatch, `experts` those of the whole group."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    microbatches: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}: {getattr(self, field.name)} is not a positive integer")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than the {self.experts} experts")

    @property
    def projection_flops(self) -> int:
        """Of one down projection, for the tokens of one rank: `2 * hidden * intermediate * top_k` a token."""
        return 2 * self.hidden * self.intermediate * self.top_k * self.tokens


SHAPES = {
    "cpu": Shape(tokens=512, hidden=512, intermediate=512, experts=8, top_k=2, layers=3, microbatches=2),
    "cuda": Shape(tokens=8192, hidden=2048, intermediate=1024, experts=64, top_k=8, layers=4, microbatches=2),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run.

    Raises:
        ValueError: a value is none of the valid ones, or does not fit another.
    """

    shape: Shape
    device: str = "cpu"
    dtype: str = "float32"
    ranks: int = 2
    rounds: int = 7
    dispatchers: tuple[str, ...] = DISPATCHERS
    forms: tuple[str, ...] = tuple(FORMS)
    buffer: str = "reference"

    def __post_init__(self) -> None:
        _choice("device", self.device, tuple(SHAPES))
        _choice("dtype", self.dtype, DTYPES)
        _choice("buffer", self.buffer, BUFFERS)
        for field, valid in (("dispatchers", DISPATCHERS), ("forms", tuple(FORMS))):
            for value in getattr(self, field):
                _choice(field, value, valid)
        if self.ranks < 1:
            raise ValueError(f"ranks: {self.ranks} is not a positive integer")
        if self.rounds < FEWEST_ROUNDS:
            raise ValueError(f"rounds: {self.rounds} is less than {FEWEST_ROUNDS}: fewer give no stable median")
        if self.shape.experts % self.ranks:
            raise ValueError(
                f"experts: {self.shape.experts} cannot be shared equally by {self.ranks} ranks; give a multiple"
            )
        multiple = _ALIGNMENT // (4 if self.dtype == "float32" else 2)
        for field in ("hidden", "intermediate"):
            if getattr(self.shape, field) % multiple:
                raise ValueError(
                    f"{field}: {getattr(self.shape, field)} is not a multiple of {multiple}, as torch's grouped GEMM "
                    f"needs it in {self.dtype}"
                )
        if self.buffer == "deep_ep" and (self.device, self.dtype) != ("cuda", "bfloat16"):
            raise ValueError("buffer: deep_ep, whose kernels need --device cuda --dtype bfloat16; or take 'reference'")


def _choice(field: str, value: Any, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{field}: {value!r} is not one of {', '.join(map(repr, valid))}")
