"""The board for Grafana: a row each for rate, errors, duration, saturation, lag and copies. Pure.

A panel is a title, a unit, and the queries of its lines with their legends. Variables of the board
select the data source, the job, subjects and groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PANEL_WIDTH, PANEL_HEIGHT = 8, 7
"""The size of a panel; the board is 24 wide."""
PERIOD = "$__rate_interval"


class Panel(NamedTuple):
    """A panel: `lines` are pairs of a query and its legend."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _rate(metric: str, by: str, where: str = "") -> str:
    selector = f'job=~"$job"{where}'
    return f"sum by ({by}) (rate({metric}{{{selector}}}[{PERIOD}]))"


def _p99(metric: str, by: str, where: str = "") -> str:
    selector = f'job=~"$job"{where}'
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[{PERIOD}]))"
    return f"histogram_quantile(0.99, {rate})"


def _now(metric: str, by: str, where: str = "", function: str = "sum") -> str:
    return f'{function} by ({by}) ({metric}{{job=~"$job"{where}}})'


def _share(metric: str, limit: str) -> str:
    return f'{metric}{{job=~"$job"}} / {limit}{{job=~"$job"}}'


SUBJECT = ', subject=~"$subject"'
GROUP = f'{SUBJECT}, group=~"$group"'
OF_SUBJECT, OF_GROUP = "{{subject}}", "{{group}} of {{subject}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Rate": (
        Panel(
            "Messages stored",
            "ops",
            ((_rate("keylane_broker_stored_messages_total", "subject", SUBJECT), OF_SUBJECT),),
        ),
        Panel(
            "Messages handed out",
            "ops",
            ((_rate("keylane_broker_handed_messages_total", "subject", SUBJECT), OF_SUBJECT),),
        ),
        Panel(
            "Bytes stored",
            "Bps",
            ((_rate("keylane_broker_stored_bytes_total", "subject", SUBJECT), OF_SUBJECT),),
        ),
    ),
    "Errors": (
        Panel(
            "Refusals",
            "ops",
            ((_rate("keylane_refusals_total", "error, code"), "{{error}} {{code}}"),),
        ),
        Panel(
            "Failed tries, parked messages and dead letters",
            "ops",
            (
                (_rate("keylane_group_failed_tries_total", "group", GROUP), "failed: {{group}}"),
                (
                    _rate("keylane_group_newly_parked_messages_total", "group", GROUP),
                    "parked: {{group}}",
                ),
                (_rate("keylane_group_dead_letters_total", "group", GROUP), "dead: {{group}}"),
            ),
        ),
        Panel(
            "Disks, databases and leases",
            "ops",
            (
                (_rate("keylane_broker_failed_commits_total", "instance"), "commits {{instance}}"),
                (
                    _rate("keylane_metaserver_database_errors_total", "instance"),
                    "database {{instance}}",
                ),
                (
                    _rate("keylane_metaserver_lost_leases_total", "instance"),
                    "lost leases {{instance}}",
                ),
            ),
        ),
    ),
    "Duration": (
        Panel(
            "From send to ack by a group, p99",
            "s",
            ((_p99("keylane_group_latency_seconds", "subject, group", GROUP), OF_GROUP),),
        ),
        Panel(
            "Requests of the data plane, p99",
            "s",
            ((_p99("keylane_broker_request_seconds", "kind"), "{{kind}}"),),
        ),
        Panel(
            "HTTP calls, database and disk, p99",
            "s",
            (
                (_p99("keylane_http_request_seconds", "instance"), "HTTP {{instance}}"),
                (_p99("keylane_metaserver_database_seconds", "kind"), "database {{kind}}"),
                (_p99("keylane_broker_commit_seconds", "instance"), "commit {{instance}}"),
            ),
        ),
    ),
    "Saturation": (
        Panel(
            "Disk used, now and in four hours",
            "percentunit",
            (
                (
                    "1 - " + _share("keylane_broker_disk_free_bytes", "keylane_broker_disk_bytes"),
                    "{{instance}}",
                ),
                (
                    (
                        '1 - predict_linear(keylane_broker_disk_free_bytes{job=~"$job"}[1h], '
                        '4 * 3600) / keylane_broker_disk_bytes{job=~"$job"}'
                    ),
                    "in 4 h: {{instance}}",
                ),
            ),
        ),
        Panel(
            "Event loop delay, p99",
            "s",
            ((_p99("keylane_event_loop_delay_seconds", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Connections, database transactions and processor",
            "percentunit",
            (
                (
                    _share("keylane_connections", "keylane_connections_max"),
                    "connections {{instance}}",
                ),
                (
                    _share(
                        "keylane_metaserver_database_transactions",
                        "keylane_metaserver_database_connections",
                    ),
                    "database {{instance}}",
                ),
                (_rate("process_cpu_seconds_total", "instance"), "processor {{instance}}"),
            ),
        ),
    ),
    "Lag": (
        Panel(
            "Messages that are not acked",
            "short",
            ((_now("keylane_group_lag_messages", "subject, group", GROUP), OF_GROUP),),
        ),
        Panel(
            "Age of the oldest message that is not acked",
            "s",
            ((_now("keylane_group_lag_seconds", "subject, group", GROUP, "max"), OF_GROUP),),
        ),
        Panel(
            "Consumers and hand-overs",
            "short",
            (
                (_now("keylane_group_sessions", "subject, group", GROUP, "max"), OF_GROUP),
                (
                    f'sum(increase(keylane_metaserver_hand_overs_total{{job=~"$job"}}[{PERIOD}]))',
                    "hand-overs",
                ),
            ),
        ),
    ),
    "Copies": (
        Panel(
            "Copies that acks wait for",
            "short",
            (
                (_now("keylane_broker_copies_in_set", "instance"), "in the set {{instance}}"),
                (_now("keylane_broker_copies_wanted", "instance"), "wanted {{instance}}"),
            ),
        ),
        Panel(
            "How far copies are behind",
            "bytes",
            ((_now("keylane_broker_copy_lag_bytes", "instance, copy"), "{{copy}}"),),
        ),
        Panel(
            "Waits for copies, p99",
            "s",
            ((_p99("keylane_broker_copy_wait_seconds", "instance"), "{{instance}}"),),
        ),
    ),
}
_VARIABLES = {
    "job": "label_values(keylane_build_info, job)",
    "subject": 'label_values(keylane_subject_end_offset{job=~"$job"}, subject)',
    "group": 'label_values(keylane_group_lag_messages{job=~"$job", subject=~"$subject"}, group)',
}


def build_board() -> dict[str, Any]:
    """Return the board as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    for number, (title, row) in enumerate(ROWS.items()):
        top = number * (PANEL_HEIGHT + 1)
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
            }
        )
        panels += [
            _build_panel(panel, x=column * PANEL_WIDTH, y=top + 1)
            for column, panel in enumerate(row)
        ]
    for number, panel in enumerate(panels):
        panel["id"] = number + 1
    return {
        "title": "keylane",
        "uid": "keylane",
        "tags": ["keylane"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _build_variables()},
        "panels": panels,
    }


def _build_panel(panel: Panel, *, x: int, y: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": PANEL_HEIGHT, "w": PANEL_WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(panel.lines)
        ],
    }


def _build_variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return [
        source,
        *(
            {
                "name": name,
                "type": "query",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
                "sort": 1,
            }
            for name, query in _VARIABLES.items()
        ),
    ]
