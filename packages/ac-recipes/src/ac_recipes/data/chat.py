"""Conversations, through the tokenizer's chat template; only the assistant's turns count."""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ac_recipes.errors import UsageError

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateError(UsageError):
    """The chat template itself is missing or broken, whatever the messages."""


def encode_messages(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them the assistant wrote.

    A template that marks them itself (`{% generation %}`) is asked. With any other they are the text by which an
    assistant turn lengthens the conversation before it, the words that announce the turn left out. A token that holds
    the end of those words and the beginning of the turn does not count.

    Raises:
        TemplateError: the template is broken.
        UsageError: it refuses the conversation, or changes earlier turns when later ones are added.
    """
    template = tokenizer.chat_template
    if isinstance(template, str) and _GENERATION_BLOCK.search(template):
        encoded = _render(
            tokenizer, messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    text = _render(tokenizer, messages, tools)
    spans = [_span(tokenizer, messages, turn, tools, text) for turn in _assistant_turns(messages)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    counted = [any(first <= start < last for first, last in spans) for start, _ in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), counted


def _assistant_turns(messages: list[dict[str, Any]]) -> list[int]:
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _span(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], turn: int, tools: list[Any] | None, text: str
) -> tuple[int, int]:
    """Where in `text`, the whole conversation, the words of message `turn` stand."""
    before = _render(tokenizer, messages[:turn], tools, add_generation_prompt=True)
    through = _render(tokenizer, messages[: turn + 1], tools)
    if not (text.startswith(before) and text.startswith(through)):
        raise UsageError(
            f"the chat template renders message {turn + 1} differently when later ones follow, so which tokens are the "
            "assistant's cannot be told; give tokenizer.chat_template one with {% generation %} blocks"
        )
    return len(before), len(through)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: list[Any] | None, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **{"tokenize": False, **options})
    except Exception as error:  # a template is a program and may raise anything
        reason = " ".join(str(error).split())[:200]
        if type(error).__name__ == "TemplateSyntaxError":  # of jinja2, which is transformers' to import
            line = getattr(error, "lineno", "?")
            raise TemplateError(f"tokenizer.chat_template: the template is broken in line {line}: {reason}") from error
        raise UsageError(f"the chat template does not take these messages: {reason}") from error
