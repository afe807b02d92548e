"""The colours, patterns and style of the picture. Pure."""

from __future__ import annotations

from ...protocol.routing import PartitionState
from .bands import Band

COLOURS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00")
"""Paul Tol's light scheme: distinct for the colour-blind, and each light enough for dark text."""
PATTERNS = ("", "kl-stripes", "kl-dots")
"""The patterns on bands of the first eight broker groups, of the next eight, and so on."""
OPACITIES = {
    "kl-open": "1",
    "kl-sealed": ".45",
    "kl-expired": ".1",
    "kl-removed": ".1",
    "kl-lost": ".1",
    "kl-planned": ".1",
}
"""How strong the colour of a broker group is on its bands."""
DASHES = ("", "9 4", "2 4", "14 4 2 4", "5 3", "1 5")
STYLE = """\
.kl{--kl-ink:#14181d;--kl-soft:#5b6573;--kl-paper:#fff;--kl-line:#d5dae1;--kl-warn:#b3261e;\
color:var(--kl-ink);fill:currentColor;font-family:system-ui,sans-serif;font-size:12px}
@media(prefers-color-scheme:dark){.kl{--kl-ink:#eef1f5;--kl-soft:#a3aebc;--kl-paper:#14181d;\
--kl-line:#39424e;--kl-warn:#ff8a80}}
.kl-paper{fill:var(--kl-paper)}.kl-soft{fill:var(--kl-soft)}.kl-name{font-weight:600}
.kl-mono{font-size:11px}.kl-title{font-size:22px;font-weight:700}.kl-on{fill:#14181d}
.kl-rule{stroke:var(--kl-line);fill:none}.kl-axis{stroke:var(--kl-soft);fill:none}
.kl-widened{stroke-dasharray:1.5 4}.kl-now{stroke:var(--kl-ink);stroke-width:2}
.kl-expired,.kl-removed{stroke-opacity:.75;stroke-dasharray:4 3}
.kl-lost{fill:url(#kl-cross);stroke:var(--kl-warn)}.kl-warn{fill:var(--kl-warn)}
.kl-seal{fill:url(#kl-warned)}.kl-planned{stroke-dasharray:5 4;stroke-width:1.5}
.kl-pattern{stroke:var(--kl-ink);stroke-opacity:.45;fill:none}.kl-dot{fill-opacity:.45}
.kl-cross{stroke:var(--kl-warn);stroke-opacity:.6;fill:none}
.kl-case{stroke:var(--kl-paper);stroke-width:6;stroke-opacity:.85;fill:none}
.kl-front{stroke:var(--kl-ink);stroke-width:2.5;fill:none}.kl-thin .kl-front{stroke-width:1.5}
.kl-thin .kl-case{stroke-width:3}.kl-unknown{stroke-dasharray:1 3}
.kl-mark{fill:var(--kl-ink);stroke:var(--kl-paper);stroke-width:2}
.kl-sign{fill:var(--kl-paper);font-weight:700;text-anchor:middle}
.kl-end{text-anchor:end}.kl-middle{text-anchor:middle}
"""
"""The style of a picture. A page that embeds pictures without it must have these rules."""
PATTERN_DEFINITIONS = (
    '<defs><pattern id="kl-stripes" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="kl-pattern" d="M0 6L6 0"/></pattern>'
    '<pattern id="kl-dots" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<circle class="kl-dot" cx="3" cy="3" r="1.2"/></pattern>'
    '<pattern id="kl-cross" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<path class="kl-cross" d="M0 0L8 8M0 8L8 0"/></pattern>'
    '<pattern id="kl-warned" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="kl-cross" stroke-width="2.5" d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5"/></pattern></defs>'
)


def state_class(band: Band) -> str:
    """Return the class of a band in STYLE."""
    if band.entry.lost:
        return "kl-lost"
    if band.partition.state is PartitionState.EXPIRED:
        return "kl-expired"
    return "kl-open" if band.end is None else "kl-sealed"


def style_of(state: str, colour: str) -> dict[str, str]:
    """Return the attributes of bands in a state."""
    if state in {"kl-lost", "kl-seal"}:  # they have patterns
        return {}
    outline = {"stroke": colour} if state in {"kl-expired", "kl-removed", "kl-planned"} else {}
    return {"fill": colour, "fill_opacity": OPACITIES[state], **outline}
