"""Whatever happens to a recipe, reading it gives a value or mistakes with places, soon, and no other exception."""

import random
import time

import pytest

from ac_recipes.reader import RecipeError, read_recipe, split_overrides

VALID = """\
model: &name gpt2
seed: 7
distributed:
  strategy: fsdp2
  activation_checkpointing: {policy: budget, scope: [language, 'vision'], memory_budget: "24GiB"}
  dp_size: 8
optimizer:
  lr: 1e-4
  betas: [0.9, 0.95]
  schedule: {warmup: 10, decay: .5}
layers:
- {width: 1}
- width: 2
  name: *name
tags: [a, b]   # a comment
extra:
  text: "a\\u00e9"
  block: |-
    two
    lines
"""
VALUES = [
    "~",
    "true",
    "1",
    "1.5",
    "x",
    "'1'",
    "[]",
    "{}",
    "[1, {a: b}]",
    "!!str x",
    "*name",
    "&b c",
    "|",
    "? a",
    "<<: 1",
]
CHARACTERS = "\0\t\n\r \x85\u2028\ufeff\ud800é🙂%@`!&*?:-[]{},#|>'\"\\<=~0"
CASES = 3000


def flip_byte(text, rng):
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data.decode("utf-8", "replace")


def delete(text, rng):
    start = rng.randrange(len(text))
    return text[:start] + text[start + rng.choice([1, 1, 1, 5, 50]) :]


def insert(text, rng):
    start = rng.randrange(len(text))
    return text[:start] + rng.choice(CHARACTERS) * rng.choice([1, 1, 2, 60]) + text[start:]


def misspell_key(text, rng):
    lines = text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    key, colon, rest = lines[index].partition(":")
    if colon and len(key.strip()) > 2:
        at = rng.randrange(1, len(key))
        lines[index] = key[: at - 1] + key[at:] + key[at - 1] + colon + rest
    return "".join(lines)


def swap_value(text, rng):
    lines = text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    key, colon, _ = lines[index].partition(":")
    lines[index] = f"{key}{colon} {rng.choice(VALUES)}\n"
    return "".join(lines)


def move_line(text, rng):
    lines = text.splitlines(keepends=True)
    line = lines.pop(rng.randrange(len(lines)))
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(["", "  ", "- "]) + line)
    return "".join(lines)


MUTATIONS = [flip_byte, delete, insert, misspell_key, swap_value, move_line]


def check(schema, text, argv):
    """True if a recipe came of it. Fails on any exception but a `RecipeError` whose mistakes all have places."""
    try:
        _, overrides = split_overrides(argv)
        read_recipe(schema.Recipe, "r.yaml", overrides, text=text)
    except RecipeError as error:
        mistakes = error.mistakes
    else:
        return True
    assert mistakes
    for mistake in mistakes:
        assert 1 <= mistake.line <= len(text.splitlines()) + 1
        assert mistake.column >= 1
        assert mistake.message
        assert len(str(mistake).splitlines()) == 1
    return False


def test_the_recipe_is_valid_unharmed(schema):
    assert check(schema, VALID, [])


def test_mutated_recipes(schema):
    rng = random.Random(0)
    start = time.perf_counter()
    valid = slowest = 0
    for _ in range(CASES):
        text = VALID
        for _ in range(rng.choice([1, 1, 2, 4])):
            text = rng.choice(MUTATIONS)(text, rng) or "x"
        begun = time.perf_counter()
        valid += check(schema, text, [])
        slowest = max(slowest, time.perf_counter() - begun)
    assert CASES * 0.02 < valid < CASES * 0.9, "the mutations are too harsh, or too mild, to say anything"
    assert slowest < 1
    assert time.perf_counter() - start < 60  # about 12 s on an idle core; the bound is for hangs


def test_mutated_command_lines(schema):
    rng = random.Random(1)
    flags = ["--seed.x", "--optimizer.lr", "--distributed.activation_checkpointing.policy", "--extra.a.b", "--tags.a"]
    for _ in range(500):
        argv = []
        for _ in range(rng.randrange(1, 4)):
            flag, value = rng.choice(flags), rng.choice(VALUES)
            flag, value = (insert(flag, rng), value) if rng.random() < 0.3 else (flag, insert(value, rng))
            argv += rng.choice([[flag, value], [f"{flag}={value}"], [flag]])
        check(schema, "model: &name a\noptimizer:\nextra: {a: {b: 1}}", argv)


@pytest.mark.parametrize("character", CHARACTERS)
def test_single_characters(schema, character):
    for text in (character, character * 1000, f"model: {character}", f"{character}: a", f"model: a\n{character}"):
        check(schema, text, ["--extra.x", character, "--extra.y", character * 3])
