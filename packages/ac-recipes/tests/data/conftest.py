"""A tokenizer, and a chat template of the usual form."""

import json

import pytest

from ac_recipes.data.tokenizer import train_tokenizer

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is four times four?"},
    {"role": "assistant", "content": "It is 16."},
    {"role": "user", "content": "And its double?"},
    {"role": "assistant", "content": "\n32, naïve one \u2603"},
]


@pytest.fixture(scope="session")
def base_tokenizer():
    return train_tokenizer(["The square of four is sixteen, and its double is thirty-two. "] * 3, 300)


@pytest.fixture
def talk():
    """A conversation of five messages."""
    return [dict(message) for message in TALK]


@pytest.fixture
def chatml():
    """A chat template."""
    return CHATML


@pytest.fixture
def tokenizer(base_tokenizer):
    base_tokenizer.chat_template = CHATML
    yield base_tokenizer
    base_tokenizer.chat_template = None


@pytest.fixture
def jsonl(tmp_path):
    """`jsonl(record, ...)` writes a file of records; a record may be raw bytes."""

    def write(*records, name="data.jsonl"):
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
        return str(tmp_path / name)

    return write
