"""The systemd units: those that `keylane cluster init` writes, valid, and hardened."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keylane.cli.main import app
from support.hosts.deployed import DEPLOY, documents, settings_in
from support.server_process import run_keylane

pytestmark = pytest.mark.acceptance

PROGRAMS = ("broker", "metaserver")
EXPOSURE_MAX = 20
"""In tenths, of what `systemd-analyze security` says: 0 is a service that can do nothing, 100 one
with every right.
"""
KNOWN = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {
        *("Type", "User", "Group", "UMask", "ExecStart", "ExecReload", "Restart", "RestartSec"),
        *("TimeoutStartSec", "WatchdogSec", "MemoryMax", "Environment"),
        *("TimeoutStopSec", "LimitNOFILE", "ReadWritePaths", "NoNewPrivileges", "LockPersonality"),
        *("PrivateTmp", "PrivateDevices", "CapabilityBoundingSet", "SystemCallArchitectures"),
        *("SystemCallFilter", "SystemCallErrorNumber", "RestrictAddressFamilies"),
        *("RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "ProtectSystem"),
        *("ProtectHome", "ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs"),
        *("ProtectControlGroups", "ProtectClock", "ProtectHostname", "ProtectProc"),
    },
    "Install": {"WantedBy"},
}
"""Settings of systemd.unit(5), systemd.service(5) and systemd.exec(5)."""
TRUTHS = {
    *("NoNewPrivileges", "LockPersonality", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"),
    *("RestrictRealtime", "RestrictSUIDSGID", "ProtectHome", "ProtectKernelTunables"),
    *("ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups", "ProtectClock"),
    "ProtectHostname",
}
LINE = re.compile(r"\[(\w+)\]|([A-Za-z]+)=(.*)|")


def text_of(program: str) -> str:
    return (DEPLOY / "systemd" / f"keylane-{program}.service").read_text()


def parse_unit(text: str) -> dict[str, dict[str, str]]:
    """Section → setting → value; refuses what systemd would pass over with a warning."""
    sections: dict[str, dict[str, str]] = {}
    section = ""
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        assert match, f"neither section nor setting: {line!r}"
        if match[1]:
            section = match[1]
            assert section in KNOWN, section
            assert section not in sections, f"{section} twice"
            sections[section] = {}
        elif match[2]:
            assert match[2] in KNOWN[section], line
            assert match[2] not in sections[section], f"{match[2]} twice"
            sections[section][match[2]] = match[3]
    return sections


def test_units_are_those_that_a_new_cluster_gets(tmp_path: Path) -> None:
    made = run_keylane("cluster", "init", str(tmp_path / "made"), "--host", "a.example")
    assert made.returncode == 0, made.stderr
    for program in PROGRAMS:
        written = tmp_path / "made" / "a.example" / f"keylane-{program}.service"
        assert text_of(program) == written.read_text()


@pytest.mark.parametrize("program", PROGRAMS)
def test_unit_has_known_settings_with_possible_values(program: str) -> None:
    sections = parse_unit(text_of(program))
    assert set(sections) == set(KNOWN)
    service = sections["Service"]
    assert {name for name, value in service.items() if value == "true"} == TRUTHS
    assert service["User"] == service["Group"] == "keylane"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["Restart"] == "on-failure"
    assert service["Type"] == "notify"
    assert service["WatchdogSec"] == "30"
    assert service["TimeoutStartSec"] == "30min", "a broker that was killed reads its log first"
    (workload,) = (
        each
        for name in ("brokers", "metaservers")
        for each in documents(f"kubernetes/{name}.yaml")
        if each["kind"] in {"StatefulSet", "Deployment"}
        and each["spec"]["template"]["spec"]["containers"][0]["name"] == program
    )
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert service["MemoryMax"] + "i" == container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_unit_starts_the_program_with_the_settings_of_its_host(tmp_path: Path, program) -> None:
    run_keylane("cluster", "init", str(tmp_path / "made"), "--host", "a.example")
    service = parse_unit(text_of(program))["Service"]
    executable, *command = shlex.split(service["ExecStart"])
    assert executable == "/usr/local/bin/keylane"
    assert command[0] in app.commands
    settings = settings_in(tmp_path / "made" / "a.example", command, {})
    assert settings.is_guarded
    assert settings.tls_cert
    assert settings.data.is_relative_to(service["ReadWritePaths"])


@pytest.mark.parametrize("line", ["ProtectSytem=strict", "User keylane", "[Servce]", "User=root"])
def test_parser_refuses_a_mistake(line: str) -> None:
    """The control of the parser, which is all that looks at units where systemd is missing."""
    text = text_of("broker").replace("[Install]", f"{line}\n\n[Install]")
    with pytest.raises(AssertionError):
        parse_unit(text)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run systemd-analyze; None, with a warning, where the machine has none."""
    if shutil.which("systemd-analyze") is None:
        print(
            "systemd-analyze is missing: the units were checked by a parser alone", file=sys.stderr
        )
        return None
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_systemd_takes_the_unit_as_hardened(tmp_path: Path, program: str) -> None:
    """`verify` wants a command that is there: that of this environment."""
    unit = tmp_path / f"keylane-{program}.service"
    own = shutil.which("keylane", path=Path(sys.executable).parent)
    assert own, "the command is installed"
    unit.write_text(text_of(program).replace("/usr/local/bin/keylane", own))
    verified = analyze("verify", str(unit))
    if verified is not None:
        assert (verified.returncode, verified.stderr) == (0, "")
        judged = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(unit))
        assert judged is not None
        assert judged.returncode == 0, judged.stdout + judged.stderr
