"""What is kept in which block: from the settings, from the modules, and from what the first step shows."""

import warnings
from dataclasses import dataclass, field

from torch import nn

from ac_core.selective.budget import Candidate, spend
from ac_core.selective.families import ATTENTION, COLLECTIVE, MATMUL, CallKind, matmul_leaf
from ac_core.selective.kept import Kept, Key
from ac_core.selective.names import NamedCalls
from ac_core.selective.rule import SaveRule

_PATIENCE = 8
FORWARD = "forward"
"""What a key says of a call that is a whole module's forward."""


@dataclass
class Site:
    """What is known of a call in a block. nbytes: of the output; intensity: FLOPs that produced it, a byte; given: of
    its inputs; held: bytes that it holds for backward besides output and inputs. spoiled: a recompute could not go on
    from its output."""

    kind: CallKind
    nbytes: float
    intensity: float
    given: int = 0
    held: int = 0
    needed: bool = True
    spoiled: bool = False
    weight: bool = False
    """One factor is a weight matrix: a matmul of which the policy may keep part."""

    @property
    def costly(self) -> bool:
        """Whether keeping the call holds far more than what it is given and gives: attention that is not fused after
        all, but runs as matmuls over the square of the sequence. Fused attention holds twice that, projections
        included."""
        return self.kind.family == ATTENTION and self.held > 3 * (self.nbytes + self.given)


@dataclass
class Unit:
    """What the first forward shows of a module that makes several calls. held: bytes that it saves for backward besides
    its inputs and parameters, its output included."""

    held: int
    needed: bool = True
    spoiled: bool = False


@dataclass(frozen=True)
class Decision:
    """What a block keeps.

    calls: whose outputs are kept. modules: those that are kept as one call, in place of the calls they make. active:
    modules in whose own forward functions are to be intercepted; None: in all, since the block's calls are not known
    yet, and what the rule names is kept as it comes. unasked: kept modules whose result no recompute asks for. costly:
    functions, by module and name, that have been seen to hold much; shared by all blocks of the model.
    """

    rule: SaveRule
    calls: frozenset[Key] = frozenset()
    modules: frozenset[str] = frozenset()
    active: frozenset[str] | None = None
    unasked: frozenset[str] = frozenset()
    costly: set[tuple[str, str]] = field(default_factory=set)

    def keeps(self, key: Key, kind: CallKind) -> bool:
        """Whether to keep the call that is about to be made."""
        if key in self.calls or key[0] in self.modules:
            return True
        return self.active is None and self.rule.keeps(kind) and (key[0], kind.name) not in self.costly

    def intercepts(self, path: str) -> bool:
        """Whether to watch the functions that the module at `path` calls."""
        return self.active is None or path in self.active


@dataclass
class BlockPlan:
    """The calls of one block and, at any time, the decision about them.

    rule: what is to be kept of them. piece: it is of a part of a block alone.
    named: modules that a glob of the rule names; unasked: those of them whose result no recompute asks for. experts:
    leaf matmuls in a list inside of the block: each sees a part of the tokens, another in every step, and the policy's
    part of the matmuls leaves them out. owners: modules that were seen to run; unseen: that ran, but in a step that was
    not watched. patience: steps to go on watching for those. learnt: nothing is left to watch for. attached: the
    modules of the block have their sites.
    """

    rule: SaveRule
    decision: Decision
    experts: frozenset[str] = frozenset()
    piece: bool = False
    named: list[str] = field(default_factory=list)
    unasked: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    sites: dict[Key, Site] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    patience: int = 0
    learnt: bool = False
    stale: bool = True
    attached: bool = True

    @property
    def shown(self) -> bool:
        """Whether a step was watched. That stays so, also while there is something to watch for again."""
        return bool(self.owners)

    def met(self, path: str) -> None:
        """A module ran that has not been watched: watch the steps to come, until it runs again."""
        if path not in self.unseen:
            self.unseen.add(path)
            self.learnt, self.patience = False, _PATIENCE

    def learn(self, sites: dict[Key, Site], units: dict[str, Unit], owners: set[str]) -> None:
        """A step was watched. What it did not call is as it was, but for what was only expected of the modules."""
        if not self.owners:
            self.sites = {}
        self.sites |= sites
        self.units |= {path: unit for path, unit in units.items() if not self.units.get(path, unit).spoiled}
        self.owners |= owners | {""}
        self.unseen -= owners | {path for path, _, _ in sites}
        self.patience -= 1
        self.stale = True
        self.learnt = not self.unseen or self.patience < 0

    def ran_again(self, key: Key) -> None:
        """A recompute made this call: it was not kept. If that was because none needed it, now one does."""
        site = self.sites.get(key)
        if site is not None and self.learnt and not site.needed:
            site.needed = self.stale = True

    def served(self, kept: dict[Key, Kept]) -> None:
        """A recompute has ended: what it did not ask for need not be kept, and what it could not use, neither."""
        for key, call in kept.items():
            unit, site = self.units.get(key[0]), self.sites.get(key)
            known = unit if key[0] in self.decision.modules else site
            if call.spoiled:
                self._spoil(key[0], known)
            elif call.outputs is not None and key[0] in self.named:
                self.stale |= key[0] not in self.unasked
                self.unasked.add(key[0])
            elif call.outputs is not None and known is not None and known.needed:
                known.needed, self.stale = False, True
            elif key[0] in self.unasked and not call.dropped:
                self.unasked.discard(key[0])
                self.stale = True

    def _spoil(self, path: str, known: Site | Unit | None) -> None:
        if path in self.named:
            self.named.remove(path)
            self.stale = True
            warnings.warn(
                f"save: '{path}' is not kept any longer: its forward changes more than its result, or the block changes"
                " that in place, so that the recompute has to run it again anyway",
                stacklevel=2,
            )
        if known is not None and not known.spoiled:
            known.spoiled = self.stale = True


@dataclass
class ModelPlan:
    """The plans of the checkpointed blocks, in order: what one block does not use of the budget goes to the next.

    named: the calls that are named in the rules, for these blocks and for those of the model's other parts. unjudged:
    blocks of which those have not been told.
    """

    named: NamedCalls = field(default_factory=NamedCalls)
    blocks: list[BlockPlan] = field(default_factory=list)
    costly: set[tuple[str, str]] = field(default_factory=set)
    unjudged: list[BlockPlan] = field(default_factory=list)

    def add(self, name: str, block: nn.Module, rule: SaveRule, *, piece_of: str | None = None) -> BlockPlan:
        """A plan for one more block, or a piece of one, from what its modules tell."""
        leaves = {path: leaf for path, module in block.named_modules() if (leaf := matmul_leaf(module)) is not None}
        experts = frozenset(path for path in leaves if _is_one_of_many(block, path))
        plan = BlockPlan(rule, Decision(rule, costly=self.costly), experts, piece=piece_of is not None)
        for path, leaf in leaves.items():
            if leaf.features is not None:
                # Bytes in units of one row of output elements: until the first step shows the real ones.
                plan.sites[path, FORWARD, 0] = Site(LEAF, leaf.features, leaf.inner, weight=True)
        for path, module in block.named_modules():
            if is_list(module):
                continue  # never called: what is in it is
            if path and rule.keeps_module(name, path) and not any(inside(path, other) for other in plan.named):
                plan.named.append(path)
        self.blocks.append(plan)
        self.unjudged.append(plan)
        self.named.plans.setdefault(piece_of or name, []).append(plan)
        return plan

    def decide(self, beginning: BlockPlan) -> None:
        """Choose what each block keeps, if a step has shown something new since the last time.

        beginning: the block whose forward is about to run. Once it has shown its calls, that is the forward of a later
        step, and the blocks that have shown theirs are judged.

        Raises:
            ActivationCheckpointingError: a family or an op that is named fits no call.
        """
        if self.unjudged and beginning.shown and (new := [plan for plan in self.unjudged if plan.shown]):
            self.named.check(new)
            self.unjudged = [plan for plan in self.unjudged if not plan.shown]
        if not any(plan.stale for plan in self.blocks):
            return
        by_budget = spend([_candidates(plan) if plan.rule.part_of_matmuls else [] for plan in self.blocks])
        for plan, of_the_matmuls in zip(self.blocks, by_budget, strict=True):
            kept = self._named(plan) | of_the_matmuls
            leaves = {key for key in plan.sites if key[1] == FORWARD and key[0] in plan.named}
            modules = _merge(plan, kept | leaves) | set(plan.named)
            calls = frozenset(key for key in kept if not any(inside(key[0], module) for module in modules))
            active = frozenset(path for path, what, _ in calls if what != FORWARD) if plan.learnt else None
            unasked = frozenset(plan.unasked)
            plan.decision, plan.stale = Decision(plan.rule, calls, modules, active, unasked, self.costly), False

    def _named(self, plan: BlockPlan) -> set[Key]:
        """The calls that the rule keeps whatever they cost, as long as they hold little more than their output."""
        return {
            key
            for key, site in plan.sites.items()
            if site.needed
            and not site.spoiled
            and (key[0], site.kind.name) not in self.costly
            and plan.rule.keeps(site.kind)
        }


LEAF = CallKind(FORWARD, MATMUL, frozenset(("aten::linear", "aten::mm", "aten::addmm")))


def _candidates(plan: BlockPlan) -> list[Candidate[Key]]:
    attentive = {key[0] for key, site in plan.sites.items() if site.kind.family == ATTENTION}
    return [
        Candidate(
            key,
            site.nbytes + site.held,
            site.intensity,
            site.needed and not site.spoiled,
            any(inside(key[0], owner) for owner in attentive),
        )
        for key, site in plan.sites.items()
        if site.weight and site.kind.family == MATMUL and key[0] not in plan.experts
    ]


def _merge(plan: BlockPlan, kept: set[Key]) -> frozenset[str]:
    """Modules that can be kept as one call for no more bytes than the calls they make.

    So the recompute does not even enter an attention module. A module in which a matmul is not kept is not merged, nor
    one that saves more than the outputs of its calls (eager attention, norms between the projections).
    """
    merged: list[str] = []
    for path, unit in sorted(plan.units.items(), key=lambda item: item[0].count(".")):
        if not unit.needed or unit.spoiled or any(inside(path, other) for other in merged):
            continue
        inner = {key: site for key, site in plan.sites.items() if inside(key[0], path)}
        needed = {key: site.kind.family for key, site in inner.items() if site.needed}
        heavy = [key for key, family in needed.items() if family in (MATMUL, ATTENTION)]
        # Bytes can differ between ranks: which collectives a recompute makes must not depend on them.
        shared = [key for key, family in needed.items() if family == COLLECTIVE]
        separate = sum(site.nbytes + site.held for key, site in inner.items() if key in kept)
        if heavy and kept.issuperset(heavy) and kept.issuperset(shared) and unit.held <= 1.02 * separate:
            merged.append(path)
    return frozenset(merged)


def is_list(module: nn.Module) -> bool:
    """Whether the module only holds others, and is never called."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and "forward" not in module.__dict__


def inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _is_one_of_many(block: nn.Module, path: str) -> bool:
    """Whether the module lies in a list inside of the block."""
    module = block
    for token in path.split(".")[:-1]:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return True
        module = getattr(module, token)
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
