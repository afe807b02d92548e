"""The programs of Prometheus, from Debian's package `prometheus`: its checker and its server."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .ports import free_port


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"the tests need {name}: apt-get install prometheus"
    return path


def promtool(*arguments: str, text: str | None = None) -> str:
    """Run promtool, and return what it prints. It must find no problem."""
    done = subprocess.run(
        [_program("promtool"), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    printed = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, printed
    return printed


class PrometheusServer:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str) -> Any:
        """Return the data of an answer of the API; None while there is none."""
        try:
            with urllib.request.urlopen(f"http://{self._address}{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except (urllib.error.URLError, ConnectionError):
            return None


@contextmanager
def running_prometheus(config: str) -> Iterator[PrometheusServer]:
    """Run a Prometheus with this configuration on loopback."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prometheus.yml")
        file.write_text(config)
        process = subprocess.Popen(
            [
                _program("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield PrometheusServer(address)
        finally:
            process.terminate()
            process.wait(30)
