"""Charts of a plan and of an estimate, as files: SVG and HTML without any dependency, PNG by matplotlib."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from os import PathLike, fspath
from pathlib import Path

FORMATS = (".png", ".html", ".svg")
WIDTH, HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 24, 46, 60
_LINE, _MARK, _CHOSEN = "#2563a8", "#b45309", "#15803d"


@dataclass(frozen=True)
class Mark:
    """A point with a name. chosen: it is the one that the picture is about."""

    x: float
    y: float
    name: str
    chosen: bool = False


@dataclass(frozen=True)
class Chart:
    """One line and some marks. x, y: of the line's points; names: what to say of each. stairs: each point holds for one
    unit of x. ticks: names for places on the x axis, instead of numbers."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str]
    marks: Sequence[Mark] = ()
    stairs: bool = False
    ticks: Sequence[tuple[float, str]] = ()


def check_path(path: str | PathLike[str]) -> Path:
    """The path, if its suffix names a format.

    Raises:
        ValueError: it names none.
        ImportError: it is `.png`, and matplotlib is not installed.
    """
    suffix = (target := Path(fspath(path))).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"path: '{target}' does not end in one of {', '.join(FORMATS)}, which says the format")
    if suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ImportError(
                f"path: '{target}' needs matplotlib: pip install 'ac-core[pictures]'; .html and .svg need nothing"
            ) from None
    return target


def save_chart(chart: Chart, path: str | PathLike[str]) -> None:
    """Write a chart to a file, in the format of its suffix. Raises: as `check_path`; OSError: it cannot be written."""
    target = check_path(path)
    suffix = target.suffix.lower()
    if suffix == ".png":
        _save_png(chart, target)
    else:
        target.write_text(svg(chart) if suffix == ".svg" else page(chart), encoding="utf-8")


def page(chart: Chart) -> str:
    """A web page with the picture, and its numbers below; nothing is loaded from elsewhere."""
    rows = [(name, x, y) for name, x, y in zip(chart.names, chart.x, chart.y, strict=True)]
    rows += [(mark.name, mark.x, mark.y) for mark in chart.marks]
    cells = "\n".join(f"<tr><td>{html.escape(name)}</td><td>{x:.4g}</td><td>{y:.4g}</td></tr>" for name, x, y in rows)
    head = "".join(f"<th>{html.escape(text)}</th>" for text in ("", chart.x_label, chart.y_label))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(chart.title)}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.15em 1em;text-align:right}"
        "td:first-child{text-align:left}</style></head>\n"
        f"<body>\n{svg(chart)}\n<table><tr>{head}</tr>\n{cells}\n</table>\n</body></html>\n"
    )


def svg(chart: Chart) -> str:
    """The picture, with the name and the numbers of each point shown when the pointer rests on it."""
    places = [*chart.x, *(mark.x for mark in chart.marks)]
    across = _Axis([*places, max(places) + 1] if chart.stairs else places, zero=False)
    up = _Axis([*chart.y, *(mark.y for mark in chart.marks)], zero=True)

    def place(x: float, y: float) -> tuple[float, float]:
        inner = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        return _LEFT + across.share(x) * inner[0], HEIGHT - _BOTTOM - up.share(y) * inner[1]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, chart.title, anchor="middle", size=15),
        _text(WIDTH / 2, HEIGHT - 14, chart.x_label, anchor="middle"),
        f'<g transform="rotate(-90 18 {HEIGHT / 2})">{_text(18, HEIGHT / 2, chart.y_label, anchor="middle")}</g>',
    ]
    for value in up.ticks:
        _, y = place(across.low, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for value, name in chart.ticks or [(value, f"{value:g}") for value in across.ticks]:
        x, _ = place(value, up.low)
        parts.append(f'<path d="M{x:.1f} {HEIGHT - _BOTTOM}v5" stroke="#555"/>')
        parts.append(_text(x, HEIGHT - _BOTTOM + 19, name, anchor="middle"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}" fill="none" stroke="#555"/>')
    line = [place(x, y) for x, y in _corners(chart)]
    parts.append(
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}" fill="none" stroke="{_LINE}" '
        'stroke-width="2"/>'
    )
    shift = 0.5 if chart.stairs else 0.0
    for name, x, y in zip(chart.names, chart.x, chart.y, strict=True):
        parts.append(_dot(*place(x + shift, y), 2.5, _LINE, f"{name}: {y:.4g}"))
    for mark in chart.marks:
        x, y = place(mark.x + shift, mark.y)
        color = _CHOSEN if mark.chosen else _MARK
        parts.append(_dot(x, y, 5, color, f"{mark.name}: {mark.x:.4g}, {mark.y:.4g}"))
        left = x > WIDTH * 0.75
        parts.append(_text(x - 9 if left else x + 9, y - 8, mark.name, anchor="end" if left else "start", fill=color))
    return "\n".join([*parts, "</svg>"])


def _corners(chart: Chart) -> list[tuple[float, float]]:
    """The points of the line; of stairs, both ends of each step."""
    points = list(zip(chart.x, chart.y, strict=True))
    return [corner for x, y in points for corner in ((x, y), (x + 1, y))] if chart.stairs else points


class _Axis:
    """A range of round numbers around some values, from 0 on if asked."""

    def __init__(self, values: Sequence[float], *, zero: bool) -> None:
        low, high = (0.0 if zero else min(values)), max(values)
        span = (high - low) or abs(high) or 1.0
        rough = span / 6
        power = 10.0 ** floor(log10(rough))
        step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
        first, last = floor(low / step), ceil((low + span) / step)
        self.ticks = [number * step for number in range(first, last + 1)]
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _text(x: float, y: float, text: str, *, anchor: str, size: int = 12, fill: str = "#333") -> str:
    shown = html.escape(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{shown}</text>'


def _dot(x: float, y: float, radius: float, color: str, said: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"><title>{html.escape(said)}</title></circle>'


def _save_png(chart: Chart, target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot: no window, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    corners = _corners(chart)
    axes.plot([x for x, _ in corners], [y for _, y in corners], color=_LINE, marker="" if chart.stairs else ".")
    for mark in chart.marks:
        x, color = mark.x + (0.5 if chart.stairs else 0.0), _CHOSEN if mark.chosen else _MARK
        axes.plot([x], [mark.y], "o", color=color)
        axes.annotate(mark.name, (x, mark.y), xytext=(6, 6), textcoords="offset points", color=color)
    if chart.ticks:
        axes.set_xticks([x for x, _ in chart.ticks], [name for _, name in chart.ticks])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(target)
