"""A cluster over TLS with access control, on a host that is reached by another name than it listens
on.
"""

from __future__ import annotations

import json
from pathlib import Path

from keylane import Admin, TlsSettings
from support.ports import free_port
from support.server_process import ServerProcess, run_keylane

NAME = "localhost"


class SecuredCluster:
    """A host that `keylane cluster init` made, with access control beside TLS."""

    def __init__(self, folder: Path, meta_settings: str = "", broker_settings: str = "") -> None:
        """`meta_settings`, `broker_settings`: lines of the tables of the two programs."""
        port = free_port()
        made = run_keylane(
            *("cluster", "init", str(folder / "made"), "--data", str(folder / "data")),
            *("--host", NAME, "--meta-port", str(port), "--broker-port", str(free_port())),
            *("--output", "json"),
        )
        assert made.returncode == 0, made.stderr
        told = json.loads(made.stdout)
        self.admin_token = told["admin_token"]
        self.tls = TlsSettings(ca=told["ca"])
        self.meta = f"{NAME}:{port}"
        self.log = folder / "log"
        """What both programs write to standard error."""
        config = folder / "made" / NAME / "keylane.toml"
        text = config.read_text()
        text = text.replace('host = "0.0.0.0"', 'host = "127.0.0.1"')
        text = text.replace("[metaserver]\n", f"[metaserver]\n{meta_settings}")
        config.write_text(text.replace("[broker]\n", f"[broker]\n{broker_settings}"))
        self.metaserver, _ = self._start("metaserver", config)
        process, self.broker = self._start("broker", config)
        self.programs = [self.metaserver, process]

    def _start(self, program: str, config: Path) -> tuple[ServerProcess, str]:
        """The process, and its address."""
        with self.log.open("ab") as errors:
            arguments = ("--config", str(config))
            process = ServerProcess(f"keylane.{program}", arguments, errors=errors.fileno())
        ready = json.loads(process.stdout.readline())
        assert ready["ready"]
        return process, str(ready["address"])

    def admin(self) -> Admin:
        return Admin(self.meta, tls=self.tls, token=self.admin_token, wait_s=30)

    def stop(self) -> None:
        for process in reversed(self.programs):
            process.terminate()
            process.wait(20)
            process.stdout.close()
