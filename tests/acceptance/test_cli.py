"""The `keylane` command against a real cluster of its own: what works, and what each mistake is
answered.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from keylane.cli import completion
from keylane.cli.main import app
from support.server_process import run_keylane

pytestmark = pytest.mark.acceptance

TIMEOUT_S = 60


@dataclass(frozen=True)
class Dev:
    """A running `keylane dev`."""

    facts: dict[str, object]
    process: subprocess.Popen[str]
    data: Path

    @property
    def meta(self) -> str:
        return str(self.facts["metaserver"])

    def run(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """`keylane ARGUMENTS` against this cluster."""
        return keylane(*arguments, text=text, meta=self.meta)

    def json(self, *arguments: str, text: str | None = None) -> list[dict[str, object]]:
        """The JSON lines that `keylane ARGUMENTS --output json` answers."""
        done = self.run(*arguments, "--output", "json", text=text)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return [json.loads(line) for line in done.stdout.splitlines()]


def keylane(
    *arguments: str, text: str | None = None, meta: str | None = None, wide: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "KEYLANE_META"}
    if meta is not None:
        environment["KEYLANE_META"] = meta
    if wide:
        environment["COLUMNS"] = "200"
    return run_keylane(*arguments, text=text or "", environment=environment, timeout_s=TIMEOUT_S)


@contextmanager
def running_dev(data: Path, *options: str, status: int = 0) -> Iterator[Dev]:
    """A cluster from `keylane dev`; its first line says that it is ready, and it ends with
    `status`.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "keylane.cli",
            "dev",
            "--data",
            str(data),
            "--port",
            "0",
            "--output",
            "json",
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield Dev(json.loads(line), process, data)
    finally:
        process.terminate()
        _out, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status, errors


@pytest.fixture(scope="module")
def dev(tmp_path_factory) -> Iterator[Dev]:
    with running_dev(tmp_path_factory.mktemp("dev") / "data", "--subject", "ready") as running:
        yield running


@pytest.fixture
def own_dev(tmp_path) -> Iterator[Dev]:
    """A cluster of the test's own, whose settings it may change."""
    with running_dev(tmp_path / "data") as running:
        yield running


def test_acks_wait_for_copies_of_a_dev_cluster(tmp_path):
    with running_dev(tmp_path / "data", "--brokers", "1", "--copies", "3") as dev:
        folders = sorted(path.name for path in dev.data.iterdir())
        assert folders == ["broker-1", "broker-1-copy-1", "broker-1-copy-2", "metaserver"]
        dev.json("subject", "create", "orders")
        _produce_until_three_folders_have_it(dev)
        (shown,) = dev.json("broker", "copies", "broker-1")
        assert shown["wanted"] == 3
        assert [copy["in_set"] for copy in shown["copies"]] == [True, True]
        first, second = (copy["copy_id"] for copy in shown["copies"])
        (stored,) = dev.json("broker", "forget", "broker-1", first)
        assert stored["members"] == [second]
        _produce_until_three_folders_have_it(dev)  # its follower runs, so it joins again


def _produce_until_three_folders_have_it(dev: Dev) -> None:
    receipt: dict[str, object] = {}
    until = time.monotonic() + TIMEOUT_S
    while receipt.get("copies") != 3:
        assert time.monotonic() < until, receipt
        (receipt,) = dev.json("produce", "orders", "one", "--key", "k")


def test_dev_is_ready(dev):
    """One command gives a metaserver, two brokers and the subjects asked for, all under one
    folder.
    """
    assert dev.facts["ready"] is True
    assert set(dev.facts["brokers"]) == {"broker-1", "broker-2"}
    assert sorted(path.name for path in dev.data.iterdir()) == [
        "broker-1",
        "broker-2",
        "metaserver",
    ]
    (summaries,) = dev.json("subject", "list")
    assert {"subject": "ready", "order_strategy": "strict", "partitions": 2} in [
        {name: summary[name] for name in ("subject", "order_strategy", "partitions")}
        for summary in summaries
    ]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("consume ready --group", "completed"),
        ("scheduled list --subject", "ready"),
        ("access grant ada consume --subject ready --group", "completed"),
        ("outbox status --subject", "ready"),
        ("dev --subject", "ready"),
    ],
)
def test_option_is_completed_with_the_names_in_the_cluster(dev, monkeypatch, words, name):
    """Also that of a command without --meta, which asks the cluster of KEYLANE_META."""
    dev.json("group", "create", "ready", "completed")
    monkeypatch.setenv("KEYLANE_META", dev.meta)
    monkeypatch.setattr(completion, "WAIT_S_MIN", TIMEOUT_S)
    completed = ShellComplete(app, {}, "keylane", "_KEYLANE_COMPLETE")
    names = [each.value for each in completed.get_completions(words.split(), name[:3])]
    assert names == [name]


def test_dev_ends_when_its_data_folder_is_removed(tmp_path):
    """It would go on to answer that messages are stored, in files that nobody finds again."""
    with running_dev(tmp_path / "data", "--subject", "orders", status=1) as dev:
        assert dev.run("produce", "orders", "paid").returncode == 0
        shutil.rmtree(dev.data)
        assert dev.process.wait(TIMEOUT_S) == 1
        assert dev.process.stderr is not None
        error = json.loads(dev.process.stderr.read().splitlines()[-1])
        assert error["message"] == f"keylane stops, because its data folder {dev.data} was removed"
        assert error["hint"].startswith("What was stored in it is lost.")
        refused = dev.run("produce", "orders", "paid")
        assert refused.returncode == 1
        assert "cannot reach" in refused.stderr


def test_subject_is_created_filled_read_and_described(dev):
    """Create, describe, produce, consume, look at the group: each says what happened, offsets and
    all.
    """
    (view,) = dev.json("subject", "create", "day", "--partitions", "4", "--strategy", "strict")
    assert view["order_strategy"] == "strict"
    (again,) = dev.json("subject", "create", "day", "--partitions=4", "--order-strategy=strict")
    assert again == view

    (receipt,) = dev.json("produce", "day", "first", "--key", "a")
    assert (receipt["offset"], receipt["durable"]) == (0, "fsync")
    lines = "".join(f"a={n}\n" for n in range(1, 100)) + "b=x\n"
    receipts = dev.json("produce", "day", "--key-separator", "=", text=lines)
    assert [receipt["offset"] for receipt in receipts[:99]] == list(range(1, 100))
    (told,) = dev.json(
        "produce", "day", "--format", "json", text='{"key": "c", "value": {"n": 1}}\n'
    )
    assert told["duplicate"] is False

    (described,) = dev.json("subject", "describe", "day")
    ranges = [
        (partition["range_start"], partition["range_end"]) for partition in described["partitions"]
    ]
    assert ranges == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert {partition["broker_group"] for partition in described["partitions"]} == {
        "broker-1",
        "broker-2",
    }
    assert {partition["state"] for partition in described["partitions"]} == {"open"}
    stored = sum(
        partition["next_offset"] - partition["first_offset"]
        for partition in described["partitions"]
    )
    assert stored == 102

    some = dev.json("consume", "day", "--group", "audit", "--count", "40")
    assert len(some) == 40
    assert all(message["partition_id"] > 0 and message["fencing_token"] > 0 for message in some)
    (group,) = dev.json("group", "describe", "day", "audit")
    assert (group["sessions"], group["lag"]) == (0, 62)
    rest = dev.json("consume", "day", "--group", "audit", "--count", "62")
    values = [message["value"] for message in some + rest if message["key"] == "a"]
    assert values == ["first", *map(str, range(1, 100))]
    (group,) = dev.json("group", "describe", "day", "audit")
    assert (group["lag"], [partition["lag"] for partition in group["partitions"]]) == (
        0,
        [0, 0, 0, 0],
    )
    assert {partition["owner"] for partition in group["partitions"]} == {None}
    assert all(partition["token"] > 0 for partition in group["partitions"])
    assert sum(partition["offset"] for partition in group["partitions"]) == 102


def test_broker_group_is_cordoned(own_dev):
    """A cordoned broker group gets no new partitions until it is uncordoned; the list shows the
    cordon.
    """
    assert own_dev.run("broker", "cordon", "broker-1").returncode == 0
    (listed,) = own_dev.json("broker", "list")
    assert {broker["broker_group"]: broker["cordoned"] for broker in listed} == {
        "broker-1": True,
        "broker-2": False,
    }
    assert own_dev.run("subject", "create", "narrow").returncode == 0
    (described,) = own_dev.json("subject", "describe", "narrow")
    assert {partition["broker_group"] for partition in described["partitions"]} == {"broker-2"}
    assert "gets none" in own_dev.run("broker", "list").stdout
    assert own_dev.run("broker", "uncordon", "broker-1").returncode == 0
    assert "gets none" not in own_dev.run("broker", "list").stdout
    assert own_dev.run("broker", "cordon", "nowhere").returncode != 0


def test_group_is_shared_and_switched(dev):
    """`--shared` makes a shared group; a consumer of the other strategy is told how to switch it;
    list and describe show it.
    """
    assert dev.run("subject", "create", "crowd").returncode == 0
    dev.run("produce", "crowd", text="x\ny\nz\n")
    some = dev.json("consume", "crowd", "--group", "g", "--shared", "--count", "2")
    assert len(some) == 2
    refused = dev.run("consume", "crowd", "--group", "g", "--count", "1")
    assert refused.returncode != 0
    assert "keylane group switch" in refused.stdout + refused.stderr
    (listed,) = dev.json("group", "list", "crowd")
    assert listed == [{"group": "g", "strategy": "shared", "sessions": 0}]
    assert "is exclusive" in dev.run("group", "switch", "crowd", "g", "exclusive").stdout
    (rest,) = dev.json("consume", "crowd", "--group", "g", "--count", "1")
    assert {message["value"] for message in (*some, rest)} == {"x", "y", "z"}
    assert "exclusive" in dev.run("group", "describe", "crowd", "g").stdout
    assert "exclusive" in dev.run("group", "list", "crowd").stdout


def test_commands_print_tables_without_output_option(dev):
    """Without --output, answers are tables and sentences with the same facts."""
    assert dev.run("subject", "create", "eyes").returncode == 0
    assert "offset 0 of partition" in dev.run("produce", "eyes", "hello", "-k", "k").stdout
    assert "2 messages stored" in dev.run("produce", "eyes", text="x\ny\n").stdout
    assert "eyes" in dev.run("subject", "list").stdout
    assert "[512, 1024)" in dev.run("subject", "describe", "eyes").stdout
    shown = dev.run("consume", "eyes", "-g", "g", "-n", "3", "--output", "{key}|{value}").stdout
    assert set(shown.splitlines()) == {"k|hello", "|x", "|y"}
    assert "lag 0" in dev.run("group", "describe", "eyes", "g").stdout


def test_owner_is_shown_while_it_consumes(dev):
    """A group's owner, its token and what is left of its ttl are shown while it is at work."""
    assert dev.run("subject", "create", "owned", "--partitions", "1").returncode == 0
    consumer = subprocess.Popen(
        [sys.executable, "-m", "keylane.cli", "consume", "owned", "-g", "g", "--meta", dev.meta],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert dev.run("produce", "owned", "wake").returncode == 0
        assert consumer.stdout is not None
        assert consumer.stdout.readline().endswith("wake\n")
        (group,) = dev.json("group", "describe", "owned", "g")
        (partition,) = group["partitions"]
        assert str(consumer.pid) in partition["owner"]
        assert partition["token"] >= 1
        assert 0 < partition["expires_in_ms"] <= 10_000
        assert group["sessions"] == 1
        shown = dev.run("group", "describe", "owned", "g").stdout
        assert "1 consumer, lag" in shown
        assert str(consumer.pid) in shown
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    finally:
        consumer.terminate()
        consumer.communicate(timeout=TIMEOUT_S)
    assert consumer.returncode == 0
    (group,) = dev.json("group", "describe", "owned", "g")
    assert group["sessions"] == 0


LONG = "x" * 300
NAMED = [
    ("subject", "create", "NAME"),
    ("subject", "describe", "NAME"),
    ("group", "describe", "NAME", "g"),
    ("group", "describe", "ready", "NAME"),
    ("produce", "NAME", "value"),
    ("consume", "NAME", "-g", "g"),
    ("consume", "ready", "-g", "NAME"),
]
NAMES = ["../x", "", " ", ".hidden", "a/b", "ü", "a\nb", LONG]


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, "../x") for command in NAMED] + [(NAMED[0], name) for name in NAMES],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else repr(value)[:12],
)
def test_illegal_names_are_refused_with_their_rule(dev, command, name):
    """An illegal name of a subject or a group is refused with the rule it breaks."""
    done = dev.run(*(name if word == "NAME" else word for word in command))
    assert_error(done, "InvalidRequestError", 1101)
    assert "Names match" in done.stderr


def assert_error(done: subprocess.CompletedProcess[str], name: str, code: int) -> None:
    """Standard error has one readable block: message, code, advice; standard output is empty; the
    status is 1.
    """
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert f"[{name} {code}" in done.stderr
    assert done.stderr.startswith("keylane: ")
    assert "Traceback" not in done.stderr


def test_misspelt_subject_is_answered_with_where_the_names_are(dev):
    """The advice to create it alone would have made a second subject of a slip."""
    done = dev.run("produce", "raedy", "value")
    assert "keylane subject list shows all subjects" in done.stderr
    assert "keylane subject create" in done.stderr


def test_template_makes_a_line_of_each_row(dev):
    """The fields are those of the JSON; a wrong one is refused before a message is read."""
    dev.json("subject", "create", "rows", "--partitions", "2")
    listed = dev.run("subject", "list", "--output", "{subject} {partitions}")
    assert "rows 2\n" in listed.stdout
    described = dev.run("subject", "describe", "rows", "-o", "{subject}:{partitions.next_offset}")
    assert described.stdout == "rows:0\n" * 2
    assert_error(dev.run("consume", "rows", "-g", "g", "--output", "{nope}"), "ConfigError", 1001)


@pytest.mark.parametrize(
    ("command", "name", "code"),
    [
        (("subject", "describe", "nosuch"), "SubjectUnknownError", 1110),
        (("group", "describe", "nosuch", "g"), "SubjectUnknownError", 1110),
        (("group", "describe", "ready", "nosuch"), "GroupUnknownError", 1112),
        (("produce", "nosuch", "value"), "SubjectUnknownError", 1110),
        (("consume", "nosuch", "-g", "g"), "SubjectUnknownError", 1110),
        (("subject", "create", "ready", "--partitions", "3"), "ConflictError", 1111),
        (("produce", "ready", "v", "--key", "k" * 1025), "MessageTooLargeError", 1103),
        (("produce", "ready", "v", "--format", "json"), "ConfigError", 1001),
        (("produce", "ready", "--format", "json", "--key-separator", "="), "ConfigError", 1001),
        (("produce", "ready", "--key-separator", ""), "ConfigError", 1001),
        (("produce", "ready", "--keyless"), "ConfigError", 1001),
        (("produce", "ready", "--lines", "5-3"), "ConfigError", 1001),
        (("produce", "ready", "v", "--lines", "5-"), "ConfigError", 1001),
        (("produce", "ready", "--key", "k", "--format", "json"), "ConfigError", 1001),
        (("subject", "list", "--meta", "nowhere"), "ConfigError", 1001),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_mistakes_are_answered_with_code_and_advice(dev, command, name, code):
    """Each mistake is answered with its own error, code and advice; the cluster keeps serving."""
    assert_error(dev.run(*command), name, code)
    error = dev.run(*command, "--output", "json")
    assert error.returncode == 1
    assert error.stdout == ""
    body = json.loads(error.stderr)
    assert (body["name"], body["code"], body["fate"]) == (name, code, "not_done")
    assert dev.run("produce", "ready", "still here").returncode == 0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("nope",), ["nope"]),
        (("subject", "list", "--nope"), ["--nope"]),
        (("subject", "create"), ["SUBJECT"]),
        (("subject", "create", "none", "--partitions", "0"), ["--partitions", "1"]),
        (("subject", "create", "many", "--partitions", "1025"), ["--partitions", "1024"]),
        (("dev", "--brokers", "0"), ["--brokers", "1"]),
        (("dev", "--brokers", "33"), ["--brokers", "32"]),
        (("dev", "--copies", "0"), ["--copies", "1"]),
        (("broker", "copies", "g1", "--wanted", "0"), ["--wanted", "1"]),
        (("broker", "copies", "g1", "--wanted", "9"), ["--wanted", "5"]),
        (("cluster", "balance", "--start", "--dry-run"), ["--start", "--dry-run"]),
        (("cluster", "balance", "--stop", "--exclude", "g1"), ["--stop", "--exclude"]),
        (("demo", "--rows", "0"), ["--rows", "1000"]),
        (("demo", "--rows", "400000"), ["--rows", "336776"]),
        (("consume", "ready", "-g", "g", "--ttl-ms", "1"), ["--ttl-ms", "1000"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_usage_error_has_status_two(command, words):
    """A command line that makes no sense: status 2 and what is wrong, as a usage or as one JSON
    object.
    """
    done = keylane(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(word in done.stderr for word in words)
    assert "Usage: keylane" in done.stderr
    done = keylane(*command, "--output", "json")
    assert (done.returncode, done.stdout) == (2, "")
    body = json.loads(done.stderr)
    assert all(word in body["message"] for word in words)
    assert (body["name"], body["code"], body["fate"]) == ("ConfigError", 1001, "not_done")
    assert body["hint"].endswith("--help shows the options.")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("dev",), ["1..32", "2, or as many as the folder has", "65535"]),
        (("demo",), ["1000..336776", "default: 336776", "a temporary one"]),
        (("subject", "create"), ["1..1024"]),
        ((), ["--version"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_help_shows_ranges_and_defaults(command, words):
    """Ranges and defaults stand in the help."""
    shown = keylane(*command, "--help", wide=True)
    assert shown.returncode == 0
    text = " ".join(shown.stdout.split())
    assert [word for word in words if word not in text] == []


def test_version_is_printed():
    """The command says which version it is."""
    done = keylane("--version")
    assert (done.returncode, done.stdout) == (0, f"keylane {version('keylane')}\n")


def messages_of(dev: Dev, subject: str) -> int:
    (view,) = dev.json("subject", "describe", subject)
    return sum(partition["next_offset"] for partition in view["partitions"])


def test_produce_tells_the_bad_line_and_continues_behind_it(dev):
    """A line that is no message ends the input: the lines before it are stored and told; `--lines`
    sends the rest.
    """
    assert dev.run("subject", "create", "lines", "--partitions", "2").returncode == 0
    lines = [json.dumps({"key": f"k{n % 50}", "value": str(n)}) for n in range(30_000)]
    lines[26_385] = "bad"
    done = dev.run(
        "produce", "lines", "--format", "json", "--output", "json", text="\n".join(lines)
    )
    assert done.returncode == 1
    error = json.loads(done.stderr)
    assert error["name"] == "InputError"
    assert error["details"] == {"stored": 26_385, "line": 26_386, "lines": "26386-"}
    assert "Nothing was done" not in done.stderr
    receipts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [receipt["line"] for receipt in receipts] == list(range(1, 26_386))
    assert messages_of(dev, "lines") == 26_385

    lines[26_385] = '{"value": "mended"}'
    done = dev.run(
        "produce", "lines", "--format", "json", "--lines", "26386-", text="\n".join(lines)
    )
    assert done.stdout.startswith("3615 messages stored"), done.stderr
    assert messages_of(dev, "lines") == 30_000


def test_produce_tells_all_lines_that_are_missing(dev):
    """With an unknown subject no line is stored; with a line that is too long all other lines are
    stored.
    """
    done = dev.run("produce", "nosuch", text="a\nb\n")
    assert done.returncode == 1
    assert "Lines stored: 0; lines not stored: 1-" in done.stderr
    done = dev.run("produce", "ready", text="a\n" + "x" * (2 << 20) + "\nb\n")
    assert done.returncode == 1
    assert "line 2: " in done.stderr
    assert "Lines stored: 1; lines not stored: 2-" in done.stderr
    assert "send the missing lines of the same input: --lines 2-" in done.stderr


def test_produce_splits_at_a_tab_and_refuses_a_line_without_it(dev):
    assert dev.run("subject", "create", "tabs", "--partitions", "1").returncode == 0
    tab = ("produce", "tabs", "--key-separator", r"\t")
    done = dev.run(*tab, text="a\tone\nno tab\nb\ttwo\n")
    assert done.returncode == 1
    assert "line 2: no separator, so no key; --keyless" in done.stderr
    assert (
        dev.run(*tab, "--keyless", "--lines", "2-", text="a\tone\nno tab\nb\ttwo\n").returncode == 0
    )
    done = dev.run("consume", "tabs", "-g", "g", "-n", "3", "--output", "{key}={value}")
    assert done.stdout.splitlines() == ["a=one", "=no tab", "b=two"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_produce_tells_what_is_stored_when_interrupted(dev, number, status):
    producer = subprocess.Popen(
        [sys.executable, "-m", "keylane.cli", "produce", "ready", "-o", "json", "--meta", dev.meta],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert producer.stdin is not None
    assert producer.stdout is not None
    producer.stdin.write("a\nb\nc\n")
    producer.stdin.flush()
    receipts = [producer.stdout.readline() for _ in range(2)]
    producer.send_signal(number)
    assert producer.wait(TIMEOUT_S) == status
    receipts += producer.stdout.read().splitlines()
    assert [json.loads(line)["line"] for line in receipts] == [1, 2, 3]
    assert producer.stderr is not None
    error = json.loads(producer.stderr.read())
    assert error["details"] == {"stored": 3, "line": 4, "lines": "4-"}
    for stream in (producer.stdin, producer.stdout, producer.stderr):
        stream.close()


@pytest.mark.parametrize("options", [(), ("-o", "json")], ids=["table", "json"])
def test_command_ends_quietly_when_interrupted_while_it_starts(tmp_path, options):
    """Ctrl-C while modules are imported: no traceback."""
    hook = tmp_path / "interrupted.py"
    hook.write_text(
        "import runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[0]: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_module('keylane.cli', run_name='__main__')\n"
    )
    for module in ("click", "keylane.cli.main", "keylane.cli.connection"):
        done = subprocess.run(
            [sys.executable, str(hook), module, "subject", "list", *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert (done.returncode, done.stdout) == (130, ""), module
        assert "Traceback" not in done.stderr, module


def test_unreachable_metaserver_is_told_by_every_command():
    """Every command tells that the metaserver does not answer, and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: no other program can take it
        meta = f"127.0.0.1:{taken.getsockname()[1]}"
        for command in (
            ("subject", "list"),
            ("subject", "create", "x"),
            ("produce", "x", "v"),
            ("consume", "x", "-g", "g"),
            ("group", "describe", "x", "g"),
        ):
            done = keylane(*command, meta=meta)
            assert_error(done, "NotSentError", 1201)
            assert done.stderr.startswith(f"keylane: cannot reach {meta}: connection refused [")
            assert "Check that it is running" in done.stderr
            assert "keylane dev" not in done.stderr


def test_dev_refuses_a_port_in_use(dev, tmp_path):
    """A second cluster on the same port is refused; the first keeps serving."""
    port = dev.meta.rpartition(":")[2]
    done = keylane("dev", "--data", str(tmp_path / "data"), "--port", port)
    assert_error(done, "AddressError", 1400)
    assert f"127.0.0.1:{port}: the port is in use" in done.stderr
    assert "If keylane dev already runs there, use it, or stop it." in done.stderr
    assert (
        f"The metaserver and 2 brokers use the ports {port} to {int(port) + 2}: choose others with "
        "--port, or --port 0 for any free ones."
    ) in done.stderr
    assert not (tmp_path / "data").exists()
    assert dev.run("subject", "list").returncode == 0


def test_dev_refuses_a_folder_in_use(dev):
    """A second cluster on the same folder is refused; the first keeps serving."""
    done = keylane("dev", "--data", str(dev.data), "--port", "0")
    assert_error(done, "DataFolderError", 1304)
    assert "Stop that broker, or give this one a folder of its own." in done.stderr
    assert dev.run("produce", "ready", "still here").returncode == 0


def test_dev_refuses_bad_input(tmp_path):
    """A folder that cannot be written, impossible ports and counts, and illegal names are
    refused.
    """
    file = tmp_path / "file"
    file.touch()
    good = str(tmp_path / "data")
    for arguments, name, code in [
        (("--data", str(file), "--port", "0"), "DataFolderError", 1304),
        (("--data", str(file / "deeper"), "--port", "0"), "DataFolderError", 1304),
        (("--data", good, "--port", "65535"), "AddressError", 1400),
        (("--data", good, "--port", "-1"), "AddressError", 1400),
        (("--data", good, "--port", "70000"), "AddressError", 1400),
        (("--data", good, "--port", "0", "--subject", "../x"), "InvalidRequestError", 1101),
    ]:
        done = keylane("dev", *arguments)
        assert_error(done, name, code)
        assert (name != "AddressError") or "ports are 0 to 65535" in done.stderr
    assert not Path(good).exists()


def test_dev_keeps_messages_and_brokers_when_started_again(tmp_path):
    """After a stop and a new start the same messages and brokers are there."""
    with running_dev(tmp_path / "data", "--brokers", "3", "--subject", "s") as first:
        assert len(first.json("produce", "s", text="a\nb\nc\n")) == 3
    with running_dev(tmp_path / "data") as second:
        assert len(second.facts["brokers"]) == 3
        got = second.json("consume", "s", "-g", "g", "-n", "3")
        assert sorted(message["value"] for message in got) == ["a", "b", "c"]


def test_printed_next_steps_work_when_copied(tmp_path):
    """What `keylane dev` prints can be copied: each command works as printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keylane.cli", "dev", "--data", str(tmp_path / "d"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        printed = []
        while not printed or not printed[-1].startswith("Ctrl-C"):
            printed.append(process.stdout.readline())
            assert printed[-1]
        commands = [shlex.split(line) for line in printed if line.startswith("  keylane ")]
        meta = next(line for line in printed if "KEYLANE_META" in line).strip().partition("=")[2]
        assert len(commands) == 4
        for _program, *arguments in commands:
            more = ["-n", "1"] if arguments[0] == "consume" else []
            done = keylane(*arguments, *more, meta=meta)
            assert done.returncode == 0, done.stderr
    finally:
        process.terminate()
        ended, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert (
        ended
        == f"keylane is stopping\nkeylane has stopped; everything stored is in {tmp_path / 'd'}\n"
    )


def test_command_ends_quietly_when_its_output_is_closed(dev):
    """A command whose output was closed ends quietly, and acks no message it could not print."""
    assert dev.run("subject", "create", "pipe", "--partitions", "1").returncode == 0
    lines = "".join(f"{n}\n" for n in range(20_000))
    assert len(dev.json("produce", "pipe", text=lines)) == 20_000
    consumer = subprocess.Popen(
        [sys.executable, "-m", "keylane.cli", "consume", "pipe", "-g", "g", "--meta", dev.meta],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert consumer.stdout is not None
    assert consumer.stderr is not None
    read = [consumer.stdout.readline() for _ in range(10)]
    assert len(read) == 10
    consumer.stdout.close()
    assert consumer.wait(TIMEOUT_S) == 0
    assert consumer.stderr.read() == ""
    consumer.stderr.close()
    (group,) = dev.json("group", "describe", "pipe", "g")
    assert 0 < group["lag"] <= 19_990


def test_address_of_another_program_is_told(dev):
    """An address of another kind of server is refused, also when its health call answers."""
    broker = next(iter(dev.facts["brokers"].values()))
    done = keylane("broker", "health", dev.meta)
    assert_error(done, "InvalidRequestError", 1104)
    assert f"{dev.meta} is the address of a metaserver, not of a broker" in done.stderr
    assert "takes writes" not in done.stdout
    for command in (
        ("broker", "list"),
        ("produce", "ready", "v"),
        ("subject", "list"),
        ("consume", "ready", "-g", "g"),
    ):
        done = keylane(*command, meta=broker)
        assert_error(done, "InvalidRequestError", 1104)
        assert f"{broker} is the address of a broker, not of a metaserver" in done.stderr


def test_several_metaservers_are_given_with_commas(dev):
    """A metaserver that does not answer is skipped."""
    done = keylane("produce", "ready", "v", meta=f"127.0.0.1:1,{dev.meta}")
    assert done.returncode == 0, done.stderr


def test_move_of_unknown_names_lists_the_known_ones(dev):
    """Partitions and broker groups, and the commands that list them."""
    done = dev.run("subject", "move", "99999", "--broker-group", "broker-1")
    assert_error(done, "PartitionUnknownError", 1113)
    assert "there is no partition 99999; open partitions: 1, 2" in done.stderr
    assert "keylane subject describe" in done.stderr
    (described,) = dev.json("subject", "describe", "ready")
    partition = str(described["partitions"][0]["partition_id"])
    done = dev.run("subject", "move", partition, "--broker-group", "nowhere")
    assert_error(done, "NotFoundError", 1154)
    assert (
        "there is no broker group 'nowhere'; the known ones are: broker-1, broker-2" in done.stderr
    )
    assert "keylane broker list" in done.stderr
