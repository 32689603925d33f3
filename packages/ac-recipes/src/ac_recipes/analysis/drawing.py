"""Lines over two axes, as an SVG that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10

Points = Sequence[tuple[float, float]]

COLOURS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Of Okabe and Ito, which people with any colour vision can tell apart."""

_WIDTH, _HEIGHT = 960, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 20, 80


def step_lines(lines: Mapping[str, Points], *, x_title: str, y_title: str) -> str:
    """One line a name, each level until its next point; both axes begin at zero."""
    x_ticks = _ticks(max((x for points in lines.values() for x, _ in points), default=0))
    y_ticks = _ticks(max((y for points in lines.values() for _, y in points), default=0))
    x_scale = (_WIDTH - _LEFT - _RIGHT) / x_ticks[-1]
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / y_ticks[-1]
    floor_y = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(y_title)} over {escape(x_title)}">'
    ]
    for tick in y_ticks:
        y = floor_y - tick * y_scale
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = _LEFT + tick * x_scale
        parts.append(f'<text x="{x:.1f}" y="{floor_y + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{floor_y + 38}" text-anchor="middle">{escape(x_title)}</text>')
    middle = (_TOP + floor_y) / 2
    parts.append(f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>')
    place = float(_LEFT)
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = [f"M{_LEFT + points[0][0] * x_scale:.1f} {floor_y - points[0][1] * y_scale:.1f}"]
        path += [f"H{_LEFT + x * x_scale:.1f}V{floor_y - y * y_scale:.1f}" for x, y in points[1:]]
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<rect x="{place}" y="{_HEIGHT - 24}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{place + 20}" y="{_HEIGHT - 12}">{escape(name)}</text>')
        place += 50 + 8 * len(name)
    return "\n".join([*parts, "</svg>"])


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, four to nine of them."""
    if most <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** floor(log10(most))
    step = next(unit * share for share in (0.2, 0.25, 0.5, 1.0, 2.0) if most / (unit * share) <= 8)
    count = -int(-most // step)
    return [round(step * number, 12) for number in range(count + 1)]
