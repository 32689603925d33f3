"""Walks a recipe of AutoModel and makes one of ours of it, every value with the place where it was written."""

from ac_recipes.automodel.defaults import add_defaults
from ac_recipes.automodel.rules import LeftOut, Translation, is_text, same
from ac_recipes.automodel.section import Section, Target
from ac_recipes.automodel.table import KNOWN, RECIPE, SECTIONS
from ac_recipes.reader.mistakes import KeyPath, MistakeLog, Place
from ac_recipes.reader.nodes import Entry, ListNode, MapNode, Node, ScalarNode, node_of
from ac_recipes.reader.targets import TARGET, refusal


class Translator:
    """Rewrites a recipe on its way through the reader.

    A recipe is AutoModel's if it has a key `recipe` or a `model._target_`; then all of it is translated, and what
    AutoModel takes by default is written out. In another recipe only those sections are that have a `_target_` in them.

    Attributes:
        is_automodel: Whether the recipe was AutoModel's.
        tree: What came of it.
        left_out: What it said and the translation does not, with the reasons.
    """

    def __init__(self) -> None:
        self.is_automodel = False
        self.tree: MapNode | None = None
        self.left_out: list[LeftOut] = []

    def __call__(self, root: MapNode, log: MistakeLog) -> MapNode:
        model = root.entries.get("model")
        named = model is not None and isinstance(model.node, MapNode) and TARGET in model.node.entries
        self.is_automodel = named or "recipe" in root.entries
        walk = _Walk(log, null_words=self.is_automodel)
        for key, entry in root.entries.items():
            if self.is_automodel or _names_code(entry.node):
                walk.key(RECIPE, (key,), entry)
            else:
                walk.translation.keep(key, entry)
        if self.is_automodel:
            add_defaults(walk.translation, root)
        self.left_out = walk.translation.left_out
        self.tree = _built(root.place, walk.translation.entries, incomplete=root.incomplete or walk.incomplete)
        return self.tree


class _Walk:
    def __init__(self, log: MistakeLog, *, null_words: bool) -> None:
        self.log = log
        self.translation = Translation(log, null_words=null_words)
        self.incomplete = False

    def key(self, section: Section, path: KeyPath, entry: Entry) -> None:
        rule = section.rules.get(str(path[-1]))
        below = SECTIONS.get(".".join(map(str, path))) or (Section() if len(path) == 1 and rule is None else None)
        if below is not None and isinstance(entry.node, MapNode):
            self.section(below, path, entry)
            return
        if not self._refuse_names_in(entry.node, path):
            self.translation.written = path
            (rule or same)(self.translation, path, entry)

    def section(self, section: Section, path: KeyPath, entry: Entry) -> None:
        node = entry.node
        switch = node.entries.get(section.switch) if section.switch else None
        if switch is not None and is_text(switch.node, "false"):
            if not self._refuse_names_in(node, path):
                self.translation.leave_out(path, entry, "is turned off")
            return
        if section.refused is not None:
            self.translation.refuse(path, entry, section.refused)
            self.incomplete = True
            return
        target = self._target(section, path, node)
        if target is None:  # what the keys mean is then not known either
            for name, below in node.entries.items():
                if name != TARGET:
                    self._refuse_names_in(below.node, (*path, name))
            return
        section = section.with_rules(target.rules)
        for name, below in node.entries.items():
            if name != TARGET:
                self.key(section, (*path, name), below)
        for name, value in target.fields.items():
            if not self.translation.has(*path, name):
                place = node.entries[TARGET].key_place
                self.translation.put((*path, name), Entry(place, node_of(value, place)))
        if not node.entries:  # `{}`: the section is there, with its defaults
            self.translation.open(path, entry)

    def _target(self, section: Section, path: KeyPath, node: MapNode) -> Target | None:
        """What the `_target_` of `node` stands for; None, with a mistake in the log, if it is not known."""
        if TARGET not in node.entries:
            return Target()
        name = node.entries[TARGET].node
        found = section.target(name.text) if isinstance(name, ScalarNode) else None
        if found is not None and found.refused:
            self.log.add(name.place, (*path, TARGET), f"not supported: {found.refused}")
        elif found is None:
            message, near = refusal(name, section.targets)
            remedy = f"; {section.remedy}" if section.remedy and near is None else ""
            self.log.add(name.place, (*path, TARGET), message + remedy, near)
        else:
            return found
        self.incomplete = True
        return None

    def _refuse_names_in(self, node: Node, path: KeyPath) -> bool:
        """Report every unknown `_target_` in something that is not translated; whether there was one."""
        told: list[bool] = []
        match node:
            case MapNode():
                told = [self._refuse_names_in(e.node, (*path, key)) for key, e in node.entries.items()]
                named = node.entries.get(TARGET)
                if named is not None and not (isinstance(named.node, ScalarNode) and named.node.text in KNOWN):
                    self.log.add(named.node.place, (*path, TARGET), *refusal(named.node, KNOWN))
                    self.incomplete = True
                    told.append(True)
            case ListNode():
                told = [self._refuse_names_in(item, (*path, at)) for at, item in enumerate(node.items)]
        return any(told)


def _names_code(node: Node) -> bool:
    match node:
        case MapNode():
            return TARGET in node.entries or any(_names_code(entry.node) for entry in node.entries.values())
        case ListNode():
            return any(map(_names_code, node.items))
    return False


def _built(place: Place, entries: dict[str, tuple[Place, object]], *, incomplete: bool) -> MapNode:
    built = {
        key: Entry(at, _built(at, below, incomplete=incomplete) if isinstance(below, dict) else below)
        for key, (at, below) in entries.items()
    }
    return MapNode(place, built, incomplete)
