"""The assistant's words count, to the token."""

import pytest

from ac_recipes.data.chat import encode_messages
from ac_recipes.errors import UsageError

MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|endoftext|>\n{% endgeneration %}{% else %}"
    "{{ message['content'] }}<|endoftext|>\n{% endif %}{% endfor %}"
)


def counted_text(tokenizer, messages):
    ids, counted = encode_messages(messages, tokenizer)
    return tokenizer.decode([token for token, counts in zip(ids, counted, strict=True) if counts])


def test_only_what_the_assistant_said_counts(tokenizer, talk):
    ids, _ = encode_messages(talk, tokenizer)
    assert ids == tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    expected = f"{talk[2]['content']}<|endoftext|>\n{talk[4]['content']}<|endoftext|>\n"
    assert counted_text(tokenizer, talk) == expected


def test_a_template_that_marks_the_assistant_s_words_gives_the_same(tokenizer, talk):
    by_prefix = encode_messages(talk, tokenizer)
    tokenizer.chat_template = MARKED
    assert encode_messages(talk, tokenizer) == by_prefix


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer, talk, chatml):
    tokenizer.chat_template = chatml.replace(
        "{{ message['content'] }}", "{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}{% endif %}"
    )
    with pytest.raises(UsageError, match="renders message 3 differently when later ones follow"):
        encode_messages(talk, tokenizer)
    assert "16" in counted_text(tokenizer, talk[:3])


def test_what_a_template_does_not_take_is_one_line(tokenizer, talk):
    tokenizer.chat_template = "{{ raise_exception('no system\nmessages') }}"
    with pytest.raises(UsageError, match="^the chat template does not take these messages: no system messages$"):
        encode_messages(talk, tokenizer)
