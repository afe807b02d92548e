"""The folder of a cluster: settings are changed in place, and files as a whole."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from keylane.cli.commands.cluster.folder import (
    ClusterFolder,
    Leaving,
    draw_token,
    replace_file,
)
from keylane.protocol.errors import Reason
from support.raising import raises

OLD, NEW = "a" * 64, "b" * 64
WRITTEN = {
    "in a line": f'broker_token_hashes = ["g1:{OLD}"]',
    "in several lines": f'broker_token_hashes = [\n    "g1:{OLD}",\n]',
    "with a remark": f'broker_token_hashes = ["g1:{OLD}"] # of a.example',
}


def write(folder: Path, entry: str, *, more: str = "") -> ClusterFolder:
    host = folder / "a.example"
    host.mkdir(parents=True)
    (folder / "ca.pem").write_text("")
    (host / "keylane.toml").write_text(
        "# mine\n\n[metaserver]\n"
        'host = "0.0.0.0"\nadvertised_host = "a.example"\nport = 7000  # as ever\n'
        f'{entry}\naccess = "on"\n\n[broker]\n'
        f'group = "g1"\nhost = "::1"\nport = 7100\nmeta = ["a.example:7000"]\n{more}'
    )
    return ClusterFolder.read(folder)


@pytest.mark.parametrize("form", WRITTEN)
def test_setting_is_changed_and_all_others_stay(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path, WRITTEN[form])
    path = tmp_path / "a.example" / "keylane.toml"
    before = path.read_text()
    assert folder.put_hashes(add={NEW: "g2"})
    changed = tomllib.loads(path.read_text())
    assert changed["metaserver"]["broker_token_hashes"] == [f"g1:{OLD}", f"g2:{NEW}"]
    assert path.read_text().startswith("# mine\n")
    assert "port = 7000  # as ever\n" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not folder.put_hashes(add={NEW: "g2"}), "it has that already"
    assert folder.put_hashes(add={}, drop=[NEW])
    assert tomllib.loads(path.read_text()) == tomllib.loads(before)


def test_setting_is_added_when_it_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, "").put_hashes(add={NEW: "g2"})
    changed = tomllib.loads((tmp_path / "a.example" / "keylane.toml").read_text())
    assert changed["metaserver"]["broker_token_hashes"] == [f"g2:{NEW}"]
    assert "broker_token_hashes" not in changed["broker"]


def test_setting_that_cannot_be_changed_is_named_and_left(tmp_path: Path) -> None:
    """Its list has a bracket in a text."""
    folder = write(tmp_path, 'broker_token_hashes = ["x]y:1"]')
    path = tmp_path / "a.example" / "keylane.toml"
    before = path.read_text()
    with raises(Reason.CLUSTER_FOLDER, match="broker_token_hashes"):
        folder.put_hashes(add={NEW: "g2"})
    assert path.read_text() == before


def test_host_is_asked_where_it_always_answers(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", "").host("a.example")
    assert plain.servers == [("metaserver", "a.example:7000"), ("broker", "[::1]:7100")]
    assert not plain.may_be_silent
    more = "failover = true\n"
    assert write(tmp_path / "copy", "", more=more).host("a.example").may_be_silent
    more += "health_port = 7101\n"
    probed = write(tmp_path / "probed", "", more=more).host("a.example")
    assert probed.servers[1] == ("broker", "[::1]:7101")
    assert probed.broker_address == "[::1]:7100"
    assert not probed.may_be_silent


@pytest.mark.parametrize("text", ["[broker", "[broker]\ngroup = 1\n", "[other]\n", "broker = 3\n"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.example").mkdir()
    (tmp_path / "a.example" / "keylane.toml").write_text(text)
    with raises(Reason.CLUSTER_FOLDER, match=r"keylane\.toml|cluster init"):
        ClusterFolder.read(tmp_path)


def test_file_keeps_its_old_content_when_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "ca.key"
    replace_file(path, b"old", 0o600)
    (tmp_path / ".ca.key.new").mkdir()
    with raises(Reason.CLUSTER_FOLDER):
        replace_file(path, b"new", 0o600)
    assert path.read_bytes() == b"old"


def test_drawn_tokens_differ() -> None:
    assert len({draw_token() for _ in range(10)}) == 10


def test_second_broker_of_a_host_is_a_host_with_files_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, "")
    copy = folder.path / "a.example" / "keylane.toml"
    settings = copy.read_bytes().replace(b"[metaserver]", b"[unused]")
    folder.add_host("a.example/g2", {"keylane.toml": (settings, 0o600)})
    (tmp_path / "a.example" / ".g3.new").mkdir()
    (tmp_path / "a.example" / ".g3.new" / "keylane.toml").write_bytes(settings)
    grown = ClusterFolder.read(tmp_path)
    assert list(grown.hosts) == ["a.example", "a.example/g2"]
    second = grown.host("a.example/g2")
    assert (second.machine, second.delivered) == ("a.example", tmp_path / "a.example")
    assert second.config_folder == "/etc/keylane/g2"
    assert second.units == "keylane-broker-g2"
    assert grown.next_token_path(second).parent == tmp_path, "it is not copied to the host"
    grown.put_leaving(second, Leaving("b.example", 2, 1))
    assert grown.leaving(second) == Leaving("b.example", 2, 1)
    assert grown.leaving(grown.host("a.example")) is None
    grown.remove_host(second)
    assert list(ClusterFolder.read(tmp_path).hosts) == ["a.example"]
    assert not list(tmp_path.glob("*.json"))


def test_note_of_a_move_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "")
    (tmp_path / "a.example.leaving.json").write_text('{"to": 1}')
    with raises(Reason.CLUSTER_FOLDER, match="leaving.json"):
        folder.leaving(folder.host("a.example"))
