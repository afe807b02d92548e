"""The wire between hosts of a test: passes Ethernet frames on, late, lost or not at all, as it is
told; a program.

python wire.py SEED PORT=MAC…

Every host has a port, an interface of this network namespace. Lines of JSON on the standard input
say what happens to frames from one host to another; "" stands for all:

    {"source": "a", "target": "b", "cut": true, "loss": 0.02, "delay_ms": 50}

A frame keeps the header that says what checksums and segments are still to be made, so that large
ones stay whole.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import json
import random
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
HEADER_BYTES = 10
FRAME_BYTES_MAX = HEADER_BYTES + (1 << 16) + 64
BUFFER_BYTES = 8 << 20
WAITING_MAX = 100_000
"""Frames under way; more are lost, as in a real queue."""
FRAMES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to the frames from one host to another."""

    cut: bool = False
    loss: float = 0.0
    delay_ms: float = 0.0


class HostWire:
    """The ports, the rules, and the frames that are under way."""

    def __init__(self, hosts: dict[str, bytes], rng: random.Random) -> None:
        self._rng = rng
        self._ports = {name: _open(name) for name in hosts}
        self._by_mac = {mac: name for name, mac in hosts.items()}
        self._rules: dict[tuple[str, str], Rule] = {}
        self._waiting: list[tuple[float, int, str, bytes]] = []
        self._numbers = itertools.count()
        self.lost = 0

    def run(self) -> None:
        """Pass frames on until the standard input ends."""
        selector = selectors.DefaultSelector()
        for name, port in self._ports.items():
            selector.register(port, selectors.EVENT_READ, name)
        selector.register(sys.stdin.buffer.raw, selectors.EVENT_READ, "")  # type: ignore[attr-defined]
        print("ready", flush=True)
        while True:
            wait = None
            if self._waiting:
                wait = max(0.0, self._waiting[0][0] - time.monotonic())
            for key, _ in selector.select(wait):
                if key.data:
                    self._take(key.data)
                elif not self._listen():
                    return
            self._deliver()

    def _listen(self) -> bool:
        """Take orders; False at their end."""
        line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
        if not line:
            return False
        order = json.loads(line)
        sources, targets = (
            [name for name in self._ports if order[end] in {"", name}]
            for end in ("source", "target")
        )
        rule = Rule(order["cut"], order["loss"], order["delay_ms"])
        self._rules |= {(source, target): rule for source in sources for target in targets}
        print("done", flush=True)
        return True

    def _take(self, source: str) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                data = self._ports[source].recv(FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:  # its host's link is down
                return
            target = self._by_mac.get(data[HEADER_BYTES : HEADER_BYTES + 6])
            for name in [target] if target else self._ports:
                if name != source:
                    self._send(source, name, data)

    def _send(self, source: str, target: str, data: bytes) -> None:
        rule = self._rules.get((source, target), Rule())
        lost = rule.cut or (rule.loss and self._rng.random() < rule.loss)
        if lost or len(self._waiting) >= WAITING_MAX:
            self.lost += 1
            return
        due = time.monotonic() + rule.delay_ms / 1000
        heapq.heappush(self._waiting, (due, next(self._numbers), target, data))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            *_, target, data = heapq.heappop(self._waiting)
            try:
                self._ports[target].send(data)
            except OSError:  # its queue is full, or its link is down
                self.lost += 1


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((name, ETH_P_ALL))
    return port


def main() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    seed, *hosts = sys.argv[1:]
    pairs = (host.split("=") for host in hosts)
    macs = {name: bytes.fromhex(mac.replace(":", "")) for name, mac in pairs}
    HostWire(macs, random.Random(int(seed))).run()


if __name__ == "__main__":
    main()
