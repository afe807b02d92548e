"""Hosts of a test: network namespaces that it makes and removes, joined by a wire that can be cut,
slow or lossy.

    host a ─ veth ─┐
    host b ─ veth ─┼─ the wire (`wire.py`), in a namespace of its own
    host c ─ veth ─┘

No interface of the machine itself has a part in it, and no route leads out: the addresses are those
of RFC 5737, which exist in these namespaces alone. The delays and losses are the wire's own:
kernels without netem have them too.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000
WIRE = Path(__file__).with_name("wire.py")
OWN = Path("/proc/thread-self/ns/net")
_LIBC = ctypes.CDLL(None, use_errno=True)


class HostsLackingError(AssertionError):
    """This machine cannot have hosts: the tests of several hosts prove nothing here, and fail."""


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """The calling thread is on that host: its new sockets, threads and processes are there."""
    with OWN.open("rb") as home, Path("/run/netns", namespace).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(number: int) -> None:
    if _LIBC.setns(number, CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class HostNetwork:
    """Hosts by name, with an address each; everything is gone at the end."""

    def __init__(self, names: Sequence[str], *, seed: int) -> None:
        self._names = names
        self._seed = seed
        self._closing = ExitStack()
        self._wire: subprocess.Popen[str] | None = None

    def namespace(self, name: str) -> str:
        """The network namespace of a host."""
        return f"keylane-{os.getpid()}-{name}"

    def address(self, name: str) -> str:
        """Its IP address."""
        return f"192.0.2.{self._names.index(name) + 1}"

    def __enter__(self) -> Self:
        try:
            with ExitStack() as opening:
                self._make(opening)
                self._closing = opening.pop_all()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise HostsLackingError(
                "NO HOSTS HERE: network namespaces cannot be made, so nothing is known "
                "of several hosts.\n"
                f"Run these tests as root (CAP_NET_ADMIN, CAP_SYS_ADMIN) with iproute2.\n{said}"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def _make(self, opening: ExitStack) -> None:
        wire = self.namespace("wire")
        for namespace in (wire, *map(self.namespace, self._names)):
            _ip("netns", "add", namespace)
            opening.callback(_ip, "netns", "delete", namespace)
        macs = []
        for number, name in enumerate(self._names, 1):
            namespace, mac = self.namespace(name), f"02:00:00:00:00:{number:02x}"
            macs.append(f"{name}={mac}")
            ends = ("eth0", "netns", namespace, "address", mac)
            _ip("-n", wire, "link", "add", "name", name, "type", "veth", "peer", "name", *ends)
            _ip("-n", wire, "link", "set", "dev", name, "up")
            _ip("-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", "dev", interface, "up")
        with inside(wire):
            self._wire = subprocess.Popen(
                [sys.executable, str(WIRE), str(self._seed), *macs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        opening.callback(self._end_wire)
        assert self._wire.stdout is not None
        assert self._wire.stdout.readline() == "ready\n"

    def _end_wire(self) -> None:
        assert self._wire is not None
        self._wire.kill()
        self._wire.communicate()

    def rule(
        self,
        source: str = "",
        target: str = "",
        *,
        cut: bool = False,
        loss: float = 0.0,
        delay_ms: float = 0.0,
    ) -> None:
        """What happens from now on to frames from `source` to `target`; "" is every host. Nothing
        else: all is well.
        """
        wire = self._wire
        assert wire is not None
        assert wire.stdin is not None
        assert wire.stdout is not None
        order = {"source": source, "target": target, "cut": cut, "loss": loss, "delay_ms": delay_ms}
        print(json.dumps(order), file=wire.stdin, flush=True)
        assert wire.stdout.readline() == "done\n", "the wire has ended"

    def link(self, name: str, *, up: bool) -> None:
        """Take a host off the wire, or put it there again."""
        _ip("-n", self.namespace(name), "link", "set", "dev", "eth0", "up" if up else "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def netem_is_here(namespace: str) -> bool:
    """Whether this kernel could delay and lose frames itself; the wire does that in either case."""
    ask = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(ask, capture_output=True, check=False).returncode == 0
