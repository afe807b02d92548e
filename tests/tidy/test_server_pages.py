"""The pages of the site about the servers have every setting, metric and call, and no page that is
generated from the code has a long line.
"""

import re
from dataclasses import fields

import pytest

from keylane.protocol import limits
from tidy.test_pages import LINE_MAX
from tidy.tree import ROOT, load_site_module

servers, pages = load_site_module("servers"), load_site_module("pages")
LINES = {
    "commands": pages.command_lines,
    "errors": pages.error_lines,
    "http": servers.http_lines,
    "limits": servers.limit_lines,
    "metrics": servers.metric_lines,
    "settings": servers.setting_lines,
}
METRIC = re.compile(r'"(keylane_[a-z_]+)"')
NO_METRICS = {"keylane_outbox", "keylane_sink", "keylane_cluster"}
"""Other names that begin like a metric's."""


@pytest.mark.parametrize("page", LINES)
def test_generated_page_has_no_long_line(page):
    lines = "\n".join(LINES[page]()).splitlines()
    assert [line for line in lines if len(line) > LINE_MAX] == []


@pytest.mark.parametrize("program", servers.PROGRAMS)
def test_page_of_settings_has_each_with_its_unit(program):
    text = "\n".join(servers.setting_lines())
    section = text.partition(f"## keylane {program} run\n")[2].partition("\n## ")[0]
    for field in fields(servers.PROGRAMS[program]):
        assert f"| `--{field.name.replace('_', '-')}` |" in section
    assert "| `--retention-ms` | 259,200,000 | ms |" in text


def test_page_of_metrics_has_each_that_the_code_names():
    named = {
        name
        for folder in servers.METRIC_FOLDERS
        for path in (ROOT / folder).rglob("*metrics.py")
        for name in METRIC.findall(path.read_text())
    }
    assert len(named) > 30
    assert named - NO_METRICS <= {metric.name for metric in servers.metrics()}


def test_metric_that_counts_is_a_counter():
    for metric in servers.metrics():
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric


@pytest.mark.parametrize("program", servers.CALLS)
def test_page_of_http_has_each_call(program):
    text = "\n".join(servers.http_lines())
    for call in servers.CALLS[program]:
        assert f"| `{call.method} {call.path}` |" in text


def test_page_of_limits_has_the_constants():
    text = "\n".join(servers.limit_lines())
    assert f"| key | {limits.KEY_BYTES_MAX:,} bytes | `KEY_BYTES_MAX` |" in text
