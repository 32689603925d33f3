"""What can be done with a block besides keeping all of it and running all of it again: sets of calls to keep.

The sets are nested. The first is what the recompute would be dearest in for its bytes whatever the sizes: attention,
collectives, the router's choice. Each next one adds the matmul whose output saves the most FLOPs a byte; those of an
attention, or of another module that `selective` can then keep as one call, together. Outputs that no recompute needs
are in none.
"""

from dataclasses import dataclass
from math import log

from ac_core.selective.families import ATTENTION, COLLECTIVE, MATMUL, ROUTER
from ac_core.selective.plan import FORWARD, BlockPlan, Site, inside

KEEP_ALL = (ATTENTION, COLLECTIVE, ROUTER, MATMUL)
"""All that `selective` can keep. Under this rule a block shows what its sets can consist of."""

_WORTH = 16
"""A matmul that saves less than this part of what another does, a byte, is never kept by itself: adapters' second."""


@dataclass(frozen=True)
class _Group:
    """Matmuls that are kept together. paths: of their modules. intensity: FLOPs saved, a byte kept in addition."""

    paths: tuple[str, ...]
    intensity: float
    attentive: bool


def kept_sets(plan: BlockPlan) -> list[tuple[str, ...]]:
    """The sets for a block, each as names for `save`, from the smallest to all that is worth keeping.

    plan: what has been learnt of the block under the rule `KEEP_ALL`.
    """
    sites = {key: site for key, site in plan.sites.items() if site.needed and not site.spoiled and not site.costly}
    matmuls = {key: site for key, site in sites.items() if site.kind.family == MATMUL}
    leaves = {
        key[0]: site
        for key, site in matmuls.items()
        if site.weight and key[1] == FORWARD and key[0] not in plan.experts
    }
    attention = {key[0] for key, site in sites.items() if site.kind.family == ATTENTION and key[0]}
    groups = _groups(plan, leaves, sorted(attention))
    # Equal but for a per cent of scraps: attention's own first, for what lies between its matmuls; else as they come.
    groups.sort(key=lambda group: (-round(log(max(group.intensity, 1e-9), 1.02)), not group.attentive))
    groups = [group for group in groups if group.intensity >= groups[0].intensity / _WORTH]

    present = {site.kind.family for site in sites.values()}
    families = tuple(family for family in KEEP_ALL if family in present and family != MATMUL)
    sets = [families]
    for group in groups:
        sets.append(sets[-1] + tuple(_spelling(path) for path in group.paths))
    if any(key[0] not in leaves for key in matmuls):  # of no module of their own: grouped ones, of experts
        sets.append((*families, MATMUL))
    return [names for names in sets if names]


def _groups(plan: BlockPlan, leaves: dict[str, Site], attention: list[str]) -> list[_Group]:
    together: dict[str, list[str]] = {}
    for path in leaves:
        owners = [owner for owner in (*sorted(plan.decision.modules), *attention) if inside(path, owner)]
        together.setdefault(owners[0] if owners else path, []).append(path)
    return [
        _Group(tuple(paths), _intensity(plan, owner, [leaves[path] for path in paths]), owner in attention)
        for owner, paths in together.items()
    ]


def _intensity(plan: BlockPlan, owner: str, sites: list[Site]) -> float:
    flops = sum(site.intensity * site.nbytes for site in sites)
    nbytes = sum(site.nbytes + site.held for site in sites)
    if owner in plan.decision.modules:  # which does not keep what stays inside; families have been kept before
        others = (s for (path, _, _), s in plan.sites.items() if inside(path, owner) and s.kind.family != MATMUL)
        nbytes = plan.units[owner].held - sum(site.nbytes + site.held for site in others)
    return flops / max(nbytes, 1)


def _spelling(path: str) -> str:
    """A module that is called like a family goes by the end of its full name."""
    return f"*.{path}" if path in KEEP_ALL else path
