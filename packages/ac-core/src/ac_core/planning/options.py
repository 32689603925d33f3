"""What can be done with a block besides keeping all of it and running all of it again: sets of calls to keep.

The sets are nested. The first is what the recompute would be dearest in for its bytes whatever the sizes: attention,
collectives, the router's choice. Each next one adds the matmul whose output saves the most FLOPs a byte, as one group
with the rest of its module where `selective` keeps that as one call. Outputs that no recompute needs are in none.
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
    """Calls that are kept together. names: for all of them. intensity: FLOPs saved, a byte kept in addition."""

    names: tuple[str, ...]
    intensity: float
    attentive: bool


def kept_sets(plan: BlockPlan) -> list[tuple[str, ...]]:
    """The sets for a block, each as names for `save`, from the smallest to all that is worth keeping.

    plan: what has been learnt of the block under the rule `KEEP_ALL`.
    """
    sites = {key: site for key, site in plan.sites.items() if site.needed and not site.spoiled and not site.costly}
    modules = plan.decision.modules
    leaves = {
        key[0]: site
        for key, site in sites.items()
        if site.weight and site.kind.family == MATMUL and key[1] == FORWARD and key[0] not in plan.experts
    }
    lone = {path: site for path, site in leaves.items() if not any(inside(path, module) for module in modules)}
    attention = {key[0] for key, site in sites.items() if site.kind.family == ATTENTION}
    groups = [_module_group(module, plan) for module in sorted(modules)]
    groups += _leaf_groups(lone, attention)
    # Equal but for a per cent of scraps: attention's own first, for what lies between its matmuls; else as they come.
    groups.sort(key=lambda group: (-round(log(max(group.intensity, 1e-9), 1.02)), not group.attentive))
    groups = [group for group in groups if group.intensity >= groups[0].intensity / _WORTH]

    families = {key[0]: site.kind.family for key, site in sites.items()}
    sets = [_named(families, groups[:count]) for count in range(len(groups) + 1)]
    covered = set(leaves) | {path for path in families if any(inside(path, module) for module in modules)}
    if any(site.kind.family == MATMUL and key[0] not in covered for key, site in sites.items()):
        present = set(families.values())  # products that have no module of their own: grouped ones, of experts
        sets.append(tuple(family for family in KEEP_ALL if family in present))
    return [names for names in dict.fromkeys(sets) if names]


def _named(families: dict[str, str], groups: list[_Group]) -> tuple[str, ...]:
    """The families that the groups do not hold already, then the groups."""
    names = [name for group in groups for name in group.names]
    left = {family for path, family in families.items() if not any(inside(path, name) for name in names)}
    # A module that is called like a family goes by its full name, of which this is the end.
    return (*(family for family in KEEP_ALL[:-1] if family in left), *(f"*.{n}" if n in KEEP_ALL else n for n in names))


def _module_group(module: str, plan: BlockPlan) -> _Group:
    """A module that is kept as one call. The families inside of it are kept before, and so are free."""
    inner = [site for (path, _, _), site in plan.sites.items() if inside(path, module)]
    others = sum(site.nbytes + site.held for site in inner if site.kind.family != MATMUL)
    flops = sum(site.intensity * site.nbytes for site in inner if site.weight)
    attentive = any(site.kind.family == ATTENTION for site in inner)
    return _Group((module,), flops / max(plan.units[module].held - others, 1), attentive)


def _leaf_groups(lone: dict[str, Site], attention: set[str]) -> list[_Group]:
    """Each matmul by itself; those of an attention that are worth the same together."""
    groups: dict[tuple[str, float], list[str]] = {}
    for path, site in lone.items():
        owner = next((owner for owner in sorted(attention) if owner and inside(path, owner)), None)
        groups.setdefault((path if owner is None else owner, site.intensity), []).append(path)
    return [_Group(tuple(paths), worth, owner in attention) for (owner, worth), paths in groups.items()]
