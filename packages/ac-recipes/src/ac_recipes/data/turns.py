"""Conversations as lists of turns in YAML, the layout of the chatterbot-corpus package. Loads without torch."""

from collections.abc import Iterator
from typing import Any

import yaml

from ac_recipes.errors import UsageError


def read_turns(name: str, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The conversations of a file `{conversations: [[turn, turn, ...], ...]}`, each with its line, as messages.

    The user speaks first and the two take turns. A conversation of one turn has nothing to learn and is left out, and
    so is a last word of the user.

    Raises:
        UsageError: the file is not such YAML.
    """
    try:
        root = yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{name}: not YAML: {' '.join(str(error).split())[:200]}") from error
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    lists = next((value for key, value in pairs if key.value == "conversations"), None)
    if not isinstance(lists, yaml.SequenceNode):
        raise UsageError(f"{name}:1: expected a mapping with a list 'conversations'")
    for conversation in lists.value:
        line = conversation.start_mark.line + 1
        turns = conversation.value if isinstance(conversation, yaml.SequenceNode) else []
        if not turns or not all(isinstance(turn, yaml.ScalarNode) for turn in turns):
            raise UsageError(f"{name}:{line}: expected a list of turns")
        spoken = [turn.value for turn in turns][: len(turns) // 2 * 2]
        if spoken:
            roles = ("user", "assistant")
            yield line, {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(spoken)]}
