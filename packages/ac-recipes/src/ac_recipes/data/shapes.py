"""Which of the known kinds of record a record is, and what is wrong with one. Loads without torch."""

from collections.abc import Mapping
from typing import Any

from ac_recipes.data import squad

SHAPES = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "squad": ("context", "question", "answers"),
    "text": ("text",),
}
"""Kinds of record, and the keys that each needs. A record is the first that has all its keys; it may have others."""


def shape_of(fields: Mapping[str, Any]) -> str | None:
    """The kind of a record; None if it is none."""
    return next((shape for shape, keys in SHAPES.items() if all(key in fields for key in keys)), None)


def fault_in(fields: Mapping[str, Any]) -> str | None:
    """What is wrong with a record, in a line; None if nothing is."""
    shape = shape_of(fields)
    if shape is None:
        return _unknown(fields)
    return _fault_in_messages(fields) if shape == "messages" else _fault_in_texts(fields, shape)


def _unknown(fields: Mapping[str, Any]) -> str:
    for keys in SHAPES.values():
        if given := [key for key in keys if key in fields]:
            missing = next(key for key in keys if key not in fields)
            return f"has {_names(given)} but no {missing!r}"
    known = " or ".join("{" + ", ".join(keys) + "}" for keys in SHAPES.values())
    turns = next((key for key, value in fields.items() if isinstance(value, list) and value), None)
    example = "" if turns is None or not isinstance(fields[turns][0], dict) else f": {{messages: {turns}}}"
    has = _names(fields) or "none"
    return f"has the keys {has}; a record has {known} (dataset.column_mapping renames keys{example})"


def _fault_in_texts(fields: Mapping[str, Any], shape: str) -> str | None:
    for key in SHAPES[shape]:
        if key != "answers" and not isinstance(fields[key], str):
            return f"{key!r} is {type(fields[key]).__name__}, not text"
    learnt = SHAPES[shape][-1]
    if shape == "squad" and squad.answer_of(fields) is None:
        return "has no answer in 'answers'; leave out what cannot be answered"
    return None if fields[learnt] else f"{learnt!r} is empty: nothing in it would count"


def _fault_in_messages(fields: Mapping[str, Any]) -> str | None:
    messages, tools = fields["messages"], fields.get("tools")
    if not isinstance(messages, list) or not messages:
        return "'messages' is not a list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} has no 'role'{_instead(message)}"
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"'content' of message {number} is not text"
    if all(message["role"] != "assistant" for message in messages):
        return "no message has the role 'assistant', so nothing in it would count"
    return None if tools is None or isinstance(tools, list) else "'tools' is not a list"


def _instead(message: Any) -> str:
    """What a message without a role has, and what to write in place of it."""
    if not isinstance(message, dict):
        return f", it is {type(message).__name__}; a message is {{role, content}}"
    said = f"; it has {_names(message) or 'nothing'}, and a message is {{role, content}}"
    if "from" in message and "value" in message:
        said += ": write 'from' as 'role' ('human' is 'user', 'gpt' is 'assistant') and 'value' as 'content'"
    return said


def _names(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys)
