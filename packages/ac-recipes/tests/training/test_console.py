"""Lines for a pipe; colour and a live line for a terminal."""

import io

import pytest

from ac_recipes.training import console as module
from ac_recipes.training.console import RunConsole

FIGURES = {"loss": 1.5, "grad_norm": 0.25, "lr": 1e-3, "peak_bytes": 3 * 2**30, "rate": 1234.5}
LINE = "step  2/10 | loss 1.5000 | grad_norm 0.25 | lr 1.00e-03 | mem 3.00 GiB | 1,234 tokens/s"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, monkeypatch, **environment):
    """What a short run prints to `stream`."""
    for name in ("NO_COLOR", "TERM", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module.sys, "stdout", stream)
    console = RunConsole(silent=False)
    console.asked_applied([("loss", "fused", "fused", "[bold] is no markup here")])
    with console.progress(0, 10):
        console.step(1, 10, **FIGURES, line=False)
        console.step(2, 10, **FIGURES, line=True)
        console.line("step 2/10 | validation loss [red]1.0")
    console.line("done")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "environment"),
    [
        (io.StringIO, {"TERM": "xterm"}),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}),
        (Terminal, {"TERM": "dumb"}),
        (Terminal, {}),
    ],
)
def test_piped_or_without_colour_it_is_plain_lines(monkeypatch, stream, environment):
    text = shown(stream(), monkeypatch, **environment)
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.splitlines()[-3:] == [LINE, "step 2/10 | validation loss [red]1.0", "done"]


def test_a_terminal_has_a_live_line_below_the_lines(monkeypatch):
    text = shown(Terminal(), monkeypatch, TERM="xterm-256color", COLUMNS="200")
    assert "\x1b[" in text
    assert LINE in text
    assert "step 2/10 | validation loss [red]1.0" in text
    assert "2/10 " in text
    assert text.rstrip().endswith("done")
    live = "loss 1.5000 | grad_norm 0.25 | lr 1.00e-03 | mem 3.00 GiB | 1,234 tokens/s"
    assert text.count(live) > 1, "once in the line that stays, and in the live one"


def test_other_ranks_are_silent(monkeypatch):
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module.sys, "stdout", stream)
    console = RunConsole(silent=True)
    with console.progress(0, 10):
        console.step(1, 10, **FIGURES, line=True)
    assert not stream.getvalue()
