"""A cluster over TLS with access control, on a host that is reached by another name than it listens on."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from keylane import TlsSettings
from keylane.protocol.access.tokens import make_token
from support.ports import free_port
from support.server_process import ServerProcess, run_keylane

NAME = "localhost"


class SecuredCluster:
    """A host that `keylane cluster init` made, with access control beside TLS."""

    def __init__(self, folder: Path) -> None:
        self.admin_token = make_token(secrets.randbits)
        admin, cluster = folder / "admin.token", folder / "cluster.token"
        admin.write_text(self.admin_token)
        cluster.write_text(make_token(secrets.randbits))
        port = free_port()
        made = run_keylane(
            *("cluster", "init", str(folder / "made"), "--data", str(folder / "data")),
            *("--host", NAME, "--meta-port", str(port), "--broker-port", str(free_port())),
            *("--output", "json"),
        )
        assert made.returncode == 0, made.stderr
        self.tls = TlsSettings(ca=json.loads(made.stdout)["ca"])
        self.meta = f"{NAME}:{port}"
        config = folder / "made" / NAME / "keylane.toml"
        listens = 'host = "127.0.0.1"\naccess = "on"'
        text = config.read_text().replace('host = "0.0.0.0"', listens)
        files = f'admin_token_file = "{admin}"\ncluster_token_file = "{cluster}"'
        text = text.replace("[metaserver]", f"[metaserver]\n{files}")
        config.write_text(text.replace("[broker]", f'[broker]\ntoken_file = "{cluster}"'))
        self.programs = [self._start(program, config) for program in ("metaserver", "broker")]

    def _start(self, program: str, config: Path) -> ServerProcess:
        process = ServerProcess(f"keylane.{program}", ("--config", str(config)))
        assert json.loads(process.stdout.readline())["ready"]
        return process

    def stop(self) -> None:
        for process in reversed(self.programs):
            process.terminate()
            process.wait(20)
            process.stdout.close()
