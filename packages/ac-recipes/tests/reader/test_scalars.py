from typing import Any, Literal

import pytest

from ac_recipes.reader.scalars import Kind, kind_of, quoted


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (Kind.NULL, ["", "~", "null", "Null", "NULL"]),
        (Kind.BOOL, ["true", "True", "TRUE", "yes", "Yes", "on", "ON", "false", "no", "No", "OFF"]),
        (Kind.INT, ["0", "-0", "12", "+12", "-12", "1_000", "9" * 300]),
        (Kind.FLOAT, ["1.0", "1e-4", "1E5", "-.5", "5.", "1_0.5", "1.5e+3", "0.1", "00.1"]),
        (Kind.DOUBTFUL, ["010", "-010", "0_1", "0x1F", "0o17", "0b11", "nan", ".NaN", "-inf", ".inf", "Infinity"]),
        (Kind.DOUBTFUL, ["1e999", "9" * 301]),
        (Kind.STRING, ["none", "tRue", "y", "n", "12:30", "2024-01-01", "1e", ".", "-", "1.2.3", "0-7,12-", "٣"]),
    ],
)
def test_kinds(kind, texts):
    assert {text: kind_of(text) for text in texts} == dict.fromkeys(texts, kind)


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (bool, "yes", True),
        (bool, "Off", False),
        (bool | None, "~", None),
        (int, "1_000", 1000),
        (int, "-5", -5),
        (float, "1e-4", 1e-4),
        (float, "3", 3.0),
        (int | float, "3", 3),
        (int | float, "3.0", 3.0),
        (str, "12:30", "12:30"),
        (str, "2024-01-01", "2024-01-01"),
        (str, "'123'", "123"),
        (str, '"true"', "true"),
        (str, "'null'", "null"),
        (str, "''", ""),
        (str, "|\n  1\n", "1\n"),
        (str, "y", "y"),
        (int | str, "5", 5),
        (int | str, "'5'", "5"),
        (float | str, "24GiB", "24GiB"),
        (Literal[1, 2], "2", 2),
        (Literal[True, "auto"], "on", True),
        (Literal["auto", None], "null", None),
        (bool | Literal["full"], "full", "full"),
        (bool | Literal["full"], '"full"', "full"),
        (bool | Literal["true"], "'true'", "true"),
        # Only a string can be meant, so quotes are not asked for ...
        (Literal["16", "32"], "16", "16"),
        (Literal["on", "off"], "off", "off"),
        (Literal["nan", "zero"], "nan", "nan"),
        # ... and here something else can be.
        (bool | Literal["on", "off"], "off", False),
        (int | Literal["16"], "16", 16),
    ],
)
def test_the_expected_type_guides_the_reading(field_of, annotation, text, value):
    got = field_of(annotation, text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("off", "off"),
        ("12", 12),
        ("1e-4", 1e-4),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("'12'", "12"),
        ("[1, {a: [], b: {}}]", [1, {"a": [], "b": {}}]),
    ],
)
def test_any_reads_by_the_core_rules_of_yaml_1_2(field_of, text, value):
    got = field_of(Any, text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (bool, "1", "expected true or false, got the number 1"),
        (bool, '"true"', "expected true or false, got 'true'; remove the quotes"),
        (bool, "treu", "expected true or false, got 'treu'; did you mean 'true'?"),
        (int, "true", "expected an integer, got true"),
        (int, "1.0", "expected an integer, got the number 1.0"),
        (int, "1e3", "expected an integer, got the number 1e3"),
        (int, "12:30", "expected an integer, got '12:30'"),
        (int, "010", "expected an integer, got '010'; a leading zero means octal to some readers"),
        (int, "0x1F", "expected an integer, got '0x1F'; numbers are read in decimal only"),
        (int, "", "expected an integer, got nothing"),
        (bool | Literal["full"] | None, "", "expected true, false, null, or 'full'; got nothing"),
        (int, "'12'", "expected an integer, got '12'; remove the quotes"),
        (int | None, "None", "expected null or an integer, got 'None'; did you mean 'null'?"),
        (float, "nan", "expected a number, got 'nan'; a number must be finite"),
        (float, "-.inf", "expected a number, got '-.inf'; a number must be finite"),
        (float, "1e999", "expected a number, got '1e999'; the number is too large"),
        (float, "'1e-4'", "expected a number, got '1e-4'; remove the quotes"),
        (float, "on", "expected a number, got on"),
        (str, "123", "expected a string, got the number 123; quote it: '123'"),
        (str, "1.10", "expected a string, got the number 1.10; quote it: '1.10'"),
        (str, "no", "expected a string, got no; quote it: 'no'"),
        (str, "null", "expected a string, got null; quote it: 'null'"),
        (str, "", "expected a string, got nothing; quote it: ''"),
        (str, "010", "expected a string, got '010'; a leading zero means octal to some readers; quote it: '010'"),
        (str, "nan", "expected a string, got 'nan'; a number must be finite; quote it: 'nan'"),
        (Any, ".nan", "expected plain data, got '.nan'; a number must be finite; quote it: '.nan'"),
        (Literal[1, 2], "true", "expected one of 1, 2; got true"),
        (Literal["a"], "b", "expected 'a', got 'b'"),
    ],
)
def test_what_does_not_fit_is_told_with_a_remedy(mistake_of, annotation, text, message):
    assert mistake_of(annotation, text) == message


def test_an_integer_of_too_many_digits(mistake_of):
    assert mistake_of(int, "9" * 5000).endswith("; a number has at most 300 digits")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("it's", "'it''s'"), ("two\nlines", '"two\\nlines"'), ("\x85", '"\\u0085"'), ("a" * 100, None)],
)
def test_quoting(text, shown):
    assert quoted(text) == (shown or "'" + "a" * 49 + "..." + "a" * 6 + "'")
