"""The completion script is printed, and installed once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from keylane.cli.completion_scripts import completion_script, install_completion, show_completion
from keylane.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("shell", "script", "start_file"),
    [
        ("bash", ".config/keylane/completion.bash", ".bashrc"),
        ("zsh", ".config/keylane/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/keylane.fish", None),
    ],
)
def test_completion_is_installed_once(home, monkeypatch, shell, script, start_file):
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    if start_file is not None:
        (home / start_file).write_text("alias k=keylane")
    install_completion()
    install_completion()
    assert "_KEYLANE_COMPLETE" in (home / script).read_text()
    if start_file is not None:
        lines = (home / start_file).read_text().splitlines()
        assert lines == ["alias k=keylane", f"source '{home / script}'"]


def test_script_is_valid_bash(monkeypatch, capsys):
    monkeypatch.setenv("SHELL", "/bin/bash")
    show_completion()
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.strip() == completion_script("bash").strip()


@pytest.mark.parametrize("shell", ["", "/bin/tcsh"])
def test_completion_is_refused_when_the_shell_has_none(monkeypatch, shell):
    monkeypatch.setenv("SHELL", shell)
    with pytest.raises(ConfigError, match="completion works in bash, zsh, fish"):
        show_completion()


def test_completion_is_refused_when_a_file_cannot_be_written(home, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/bash")
    (home / ".config").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be installed"):
        install_completion()
