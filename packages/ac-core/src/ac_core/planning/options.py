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


@dataclass(frozen=True)
class _Group:
    """Calls that are kept together, by the name for all of them. intensity: FLOPs saved, a byte kept in addition."""

    name: str
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
    attention = [key[0] for key, site in sites.items() if site.kind.family == ATTENTION]
    groups = [_module_group(module, plan) for module in sorted(modules)]
    groups += [_leaf_group(path, site, attention) for path, site in lone.items()]
    # Equal but for a per cent of scraps: attention's own first, for what lies between its matmuls; else as they come.
    groups.sort(key=lambda group: (-round(log(max(group.intensity, 1e-9), 1.02)), not group.attentive))

    families = {key[0]: site.kind.family for key, site in sites.items()}
    sets = [_named(families, [])]
    sets += [_named(families, [group.name for group in groups[:count]]) for count in range(1, len(groups) + 1)]
    covered = set(leaves) | {path for path in families if any(inside(path, module) for module in modules)}
    if any(site.kind.family == MATMUL and key[0] not in covered for key, site in sites.items()):
        present = set(families.values())  # products that have no module of their own: grouped ones, of experts
        sets.append(tuple(family for family in KEEP_ALL if family in present))
    return [names for names in dict.fromkeys(sets) if names]


def _named(families: dict[str, str], groups: list[str]) -> tuple[str, ...]:
    """The families that the groups do not hold already, then the groups."""
    left = {family for path, family in families.items() if not any(inside(path, group) for group in groups)}
    return (*(family for family in KEEP_ALL[:-1] if family in left), *groups)


def _module_group(module: str, plan: BlockPlan) -> _Group:
    """A module that is kept as one call. The families inside of it are kept before, and so are free."""
    inner = [site for (path, _, _), site in plan.sites.items() if inside(path, module)]
    others = sum(site.nbytes + site.held for site in inner if site.kind.family != MATMUL)
    flops = sum(site.intensity * site.nbytes for site in inner if site.weight)
    attentive = any(site.kind.family == ATTENTION for site in inner)
    return _Group(module, flops / max(plan.units[module].held - others, 1), attentive)


def _leaf_group(path: str, site: Site, attention: list[str]) -> _Group:
    return _Group(path, site.intensity, any(inside(path, owner) for owner in attention))
