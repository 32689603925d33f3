"""Charts as files: what is drawn is what is known, and a page needs nothing from elsewhere."""

import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import ac_core
from ac_core.pictures import HEIGHT, WIDTH, Chart, Mark, page, save_chart, svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def model_and_batch():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False), torch.randn(8, 16, 32)


@pytest.fixture(scope="module")
def plan(model_and_batch):
    model, batch = model_and_batch
    return ac_core.plan(model, batch=batch, budget=0.7, dtype=torch.float32, optimizer="none")


@pytest.fixture(scope="module")
def estimate(model_and_batch):
    model, batch = model_and_batch
    return ac_core.estimate(model, batch=batch, dtype=torch.float32)


def titles(path):
    return [element.text for element in ET.parse(path).iter(f"{SVG}title")]


def test_the_picture_of_a_plan_has_its_curve_the_fixed_policies_and_itself(plan, tmp_path):
    plan.save_picture(tmp_path / "plan.svg")
    shown = titles(tmp_path / "plan.svg")
    assert len(shown) == len(plan.curve) + 4
    assert [text.partition(":")[0] for text in shown[-4:]] == ["none", "selective", "full", "this plan"]
    here = f"{plan.peak_bytes / 2**30:.4g}, {100 * plan.recompute_flops / plan.forward_flops:.4g}"
    assert shown[-1] == f"this plan: {here}"


def test_fixed_policies_are_what_a_step_of_each_takes(plan, model_and_batch):
    model, batch = model_and_batch
    for policy in ("none", "selective", "full"):
        found = ac_core.estimate(model, batch=batch, dtype=torch.float32, optimizer="none", policy=policy)
        assert plan.fixed[policy].recompute_flops == found.recompute_flops
        assert plan.fixed[policy].peak_bytes == pytest.approx(found.peak_bytes, rel=1e-3)


def test_the_timeline_has_every_stretch_and_the_peak(estimate, tmp_path):
    estimate.save_timeline(tmp_path / "timeline.SVG")
    shown = titles(tmp_path / "timeline.SVG")
    assert [text.rpartition(":")[0] for text in shown[:-1]] == [name for name, _ in estimate.timeline]
    assert shown[-1].startswith(estimate.peak_moment)


def test_a_page_needs_nothing_from_elsewhere_and_has_the_numbers(plan, tmp_path):
    plan.save_picture(str(tmp_path / "plan.html"))
    text = (tmp_path / "plan.html").read_text()
    HTMLParser().feed(text)
    assert re.findall(r"(?:src|href|url)\s*[=(]", text) == []
    assert text.count("<tr>") == 1 + len(plan.curve) + 4


def test_everything_is_inside_of_the_picture_and_escaped():
    marks = (Mark(3.0, 40.0, "<b> & co"), Mark(-1.0, 0.0, "low", chosen=True))
    chart = Chart("a < b", "x", "y", [0.0, 1.0, 2.0], [5.0, 7.0, 7.0], ["p", "q", "r"], marks, stairs=True)
    root = ET.fromstring(svg(chart))
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
    assert len(dots) == 5
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in dots)
    assert dots[3][1] < dots[1][1] < dots[0][1] < dots[4][1]  # up is more
    assert "<b> & co" in [element.text for element in root.iter(f"{SVG}text")]
    assert "<b>" not in page(chart)


def test_one_point_can_be_drawn():
    ET.fromstring(svg(Chart("t", "x", "y", [1.0], [0.0], ["only"])))


def test_a_path_without_a_format_is_refused(plan, tmp_path):
    for name in ("plan.jpg", "plan"):
        with pytest.raises(ValueError, match=r"^path: .*does not end in one of \.png, \.html, \.svg"):
            plan.save_picture(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_png_without_matplotlib_says_what_to_install(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'ac-core\[pictures\]'; \.html and \.svg need nothing"):
        plan.save_picture(tmp_path / "plan.png")


def test_png(plan, estimate, tmp_path):
    pytest.importorskip("matplotlib")
    plan.save_picture(tmp_path / "plan.png")
    estimate.save_timeline(tmp_path / "timeline.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
    save_chart(Chart("t", "x", "y", [1.0], [2.0], ["only"]), tmp_path / "one.png")
