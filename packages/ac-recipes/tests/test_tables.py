"""One printer for every table: bold on a terminal that takes it, plain elsewhere, and no word is markup."""

import io
import sys

import pytest

from ac_recipes.tables import print_table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, stream, **environment):
    for name in ("NO_COLOR", "TERM", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stream)
    print_table(("policy", "peak"), [("none", "12.5"), ("[bold] :smile:", "3")], numbers=("peak",))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "environment"),
    [
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}),
        (Terminal, {"TERM": "dumb"}),
        (Terminal, {}),
    ],
)
def test_plain_where_colour_is_not_wanted(monkeypatch, stream, environment):
    assert printed(monkeypatch, stream(), **environment).splitlines() == [
        "policy          peak",
        "none            12.5",
        "[bold] :smile:     3",
    ]


def test_a_heading_is_bold_on_a_terminal(monkeypatch):
    text = printed(monkeypatch, Terminal(), TERM="xterm-256color")
    assert "\x1b[1m" in text.splitlines()[0]
    assert "[bold] :smile:     3" in text


def test_a_long_row_stays_on_one_line_of_a_pipe_and_is_folded_on_a_terminal(monkeypatch):
    def lines(stream, **environment):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", stream)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        print_table(("a",), [("word " * 25,)])
        return len(stream.getvalue().splitlines())

    assert lines(io.StringIO()) == 2
    assert lines(Terminal(), COLUMNS="40") == 5
