"""Bars go to the right where keylane is ahead, to the left where a peer is, on one logarithmic
axis.
"""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from peers.plot import LABELS, WIDTH, rows_of, svg_of, x_of

RESULT = {
    "systems": {"keylane": {"durability": 2}, "kafka": {"durability": 1}, "r&d": {"durability": 2}},
    "medians": {
        "keylane": {"sent_per_s": 40.0, "single_p50_ms": 2.0},
        "kafka": {"sent_per_s": 20.0, "single_p50_ms": 1.0},
        "r&d": {"sent_per_s": 0.01},
    },
}


def test_axis_is_logarithmic_within_its_ends():
    assert x_of(0.1) == LABELS
    assert x_of(100) == LABELS + WIDTH
    assert math.isclose(x_of(4) - x_of(2), x_of(2) - x_of(1))


@pytest.mark.parametrize(("ratio", "edge"), [(1e-9, 0.1), (1e9, 100)])
def test_ratio_beyond_the_axis_stands_at_its_end(ratio, edge):
    assert x_of(ratio) == x_of(edge)


def test_rows_have_the_figures_that_both_have():
    assert rows_of(RESULT) == [
        ("sent, every receipt awaited", {"kafka": 2.0, "r&d": 4_000.0}),
        ("a single send to its ack, p50", {"kafka": 0.5}),
    ]


def test_bar_lies_to_the_right_when_keylane_is_ahead():
    svg = ET.fromstring(svg_of(RESULT))
    bars = {}
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            left = float(rect.attrib["x"])
            bars[title.text] = left, left + float(rect.attrib["width"])
    ahead, behind = bars["kafka: 2.00"], bars["kafka: 0.50"]
    assert ahead[0] == pytest.approx(x_of(1), abs=0.1)
    assert behind[1] == pytest.approx(x_of(1), abs=0.1)
    assert ahead[1] - ahead[0] == pytest.approx(behind[1] - behind[0], abs=0.2)


def test_plot_is_well_formed_and_inside_its_frame():
    text = svg_of(RESULT)
    svg = ET.fromstring(text)
    width, height = (float(svg.attrib[name]) for name in ("width", "height"))
    for x, y in re.findall(r'\bx="([\d.]+)" y="([\d.]+)"', text):
        assert float(x) <= width
        assert float(y) <= height
    assert "r&amp;d" in text
