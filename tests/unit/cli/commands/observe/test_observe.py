"""The rules and the board, as Prometheus itself reads them."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
import yaml

from keylane.cli.commands.observe.app import read_rules
from keylane.cli.commands.observe.board import build_board
from support.prometheus import promtool
from tidy.tree import ROOT

STORY = Path(__file__).with_name("rules_test.yml")
ALERTS = [rule for group in yaml.safe_load(read_rules())["groups"] for rule in group["rules"]]
BOARD = build_board()
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
ROWS = ["Rate", "Errors", "Duration", "Saturation", "Lag", "Copies"]


def test_rules_pass_the_check_of_prometheus(tmp_path: Path) -> None:
    file = tmp_path / "keylane.rules.yml"
    file.write_text(read_rules())
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(file))


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    rules, story = tmp_path / "keylane.rules.yml", tmp_path / "story.yml"
    rules.write_text(read_rules())
    story.write_text(STORY.read_text().replace("RULES", str(rules)))
    assert "SUCCESS" in promtool("test", "rules", str(story))


@pytest.mark.parametrize("name", [rule["alert"] for rule in ALERTS])
def test_alert_has_a_story_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    told = [
        bool(each.get("exp_alerts"))
        for story in yaml.safe_load(STORY.read_text())["tests"]
        for each in story["alert_rule_test"]
        if each["alertname"] == name
    ]
    assert {*told} == {True, False}


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_names_a_section_of_the_runbook(rule) -> None:
    """A line for people, how bad it is, and a heading that is there."""
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^##+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert anchor in slugs
    assert rule["annotations"]["summary"].endswith((".", "?"))
    assert rule["labels"]["severity"] in {"warning", "critical"}


def test_board_has_a_row_for_each_question() -> None:
    titles = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert titles == ROWS
    assert json.loads(json.dumps(BOARD)) == BOARD


def test_panels_of_the_board_do_not_overlap() -> None:
    places = [
        (x, y)
        for panel in BOARD["panels"]
        for x, y in product(
            range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"]),
            range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"]),
        )
    ]
    assert len({*places}) == len(places)
    assert max(x for x, _ in places) < 24


def test_queries_of_the_board_are_valid(tmp_path: Path) -> None:
    """As Grafana sends them, with the variables replaced."""
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(QUERIES)
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(QUERIES)} rules found" in promtool("check", "rules", str(file))
