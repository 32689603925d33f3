"""The report of a comparison: one HTML file that needs nothing else."""

import json
from collections.abc import Sequence
from html import escape

import torch

from ac_core.sizes import counted
from ac_recipes.analysis.comparing import ComparedRecipe
from ac_recipes.analysis.drawing import step_lines
from ac_recipes.analysis.noise import RULE
from ac_recipes.reader import dump

_STRETCHES = 400
"""Of a timeline, of which each is drawn with its lowest and its highest point."""

_STYLE = """
body { font-family: sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 0.3em 0.9em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
p, li { line-height: 1.5; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def html_report(name: str, compared: ComparedRecipe, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The page. columns, rows: the table as it is printed."""
    measured = compared.measured
    unit, unit_name = _unit(max(m.peak_bytes for m in measured.values()))
    lines = {
        policy: [(seconds * 1e3, alive / unit) for seconds, alive in m.timeline.thinned(_STRETCHES)]
        for policy, m in measured.items()
    }
    picture = step_lines(lines, x_title="milliseconds under the profiler", y_title=unit_name)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    subject = compared.subject
    where = (
        torch.cuda.get_device_name(subject.device)
        if subject.device.type == "cuda"
        else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    )
    shape = " x ".join(map(str, subject.batch["labels"].shape))
    data = json.dumps(compared.to_dict()).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(name)}: activation checkpointing compared</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(name)}: activation checkpointing compared</h1>
<p>One whole training step (forward, backward, clipping, optimizer) of {escape(type(subject.model).__name__)} on
{shape} tokens; {escape(where)}; torch {torch.__version__}; {compiled_text(compared)}.</p>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<ul>
<li>Peak: the most bytes alive at once, with parameters, gradients, optimizer state and batch. Saved: bytes that live
from forward to backward. Run again: FLOPs of matrix products, convolutions and attention that checkpointing
repeats, and how many that is of the forward's.</li>
<li>Time: the median of {counted(len(next(iter(measured.values())).seconds), "round")}. {escape(RULE)}</li>
<li>Loss: of the same weights, batch and random numbers under every policy.</li>
</ul>
<h2>Memory of a step</h2>
{picture}
<h2>The recipe</h2>
<pre>{escape(dump(subject.recipe))}</pre>
<script type="application/json" id="comparison">{data}</script>
</body>
</html>
"""


def compiled_text(compared: ComparedRecipe) -> str:
    """Whether the sides are compiled."""
    if not compared.compiled:
        return "not compiled, on any side"
    return "blocks compiled on every side (saved bytes and FLOPs are those without it)"


def _unit(largest: int) -> tuple[int, str]:
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
