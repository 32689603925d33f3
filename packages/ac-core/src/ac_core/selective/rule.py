"""The `save` setting: what selective checkpointing is to keep."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ac_core.selective.families import ATTENTION, COLLECTIVE, MATMUL, ROUTER, CallKind

_DEFAULT = (ATTENTION, COLLECTIVE, ROUTER)  # and part of the matmuls
_FAMILIES = (*_DEFAULT, MATMUL)


@dataclass(frozen=True)
class SaveRule:
    """The `save` setting, sorted. Without one: attention, collectives, routing, and part of the matmuls."""

    families: frozenset[str] = frozenset(_DEFAULT)
    ops: frozenset[str] = frozenset()
    globs: tuple[str, ...] = ()
    part_of_matmuls: bool = True

    @classmethod
    def of(cls, save: Iterable[str] | None) -> "SaveRule":
        if save is None:
            return cls()
        names = tuple(save)
        return cls(
            frozenset(n for n in names if n in _FAMILIES),
            frozenset(n.partition(".")[0] for n in names if "::" in n),
            tuple(n for n in names if n not in _FAMILIES and "::" not in n),
            part_of_matmuls=False,
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The families and ops that the setting names; none without one."""
        return (*self.ops, *(() if self.part_of_matmuls else self.families))

    def keeps(self, kind: CallKind) -> bool:
        """Whether every call of this kind is to be kept."""
        return kind.family in self.families or not self.ops.isdisjoint(kind.ops)

    def keeps_module(self, block: str, path: str) -> bool:
        """Whether a glob names the module at `path` in the block called `block`."""
        return any(fnmatchcase(path, glob) or fnmatchcase(f"{block}.{path}", glob) for glob in self.globs)
