"""What a system of the comparison is: servers to start and stop, and a client that sends and
consumes as its users would.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from peers.durability import Durability
from peers.measure import process_tree, wait_until

FIRST_OF_KEYS = ord("k")
KEYS = [b"key-%05d" % number for number in range(10_000)]
FIRST = b"first"
"""The value of the message that each producer sends when it opens."""
COMMIT_EVERY_S = 0.05
"""How often a consumer commits a position, where it does not ack each message; and once more at its
end.
"""

Ready = Callable[[], None]
"""Called once a consumer is connected."""


class Handling:
    """What a consumer does with its messages: touches key and value of each, and notes when the
    first and last came.
    """

    def __init__(self, count: int, size_bytes: int) -> None:
        self.remaining = self._count = count
        self._size_bytes = size_bytes
        self.first_at = self.last_at = 0.0

    def message(self, key: bytes, value: bytes) -> None:
        """Handle a message; keys begin with k, values have their size, but for the first of each
        producer.
        """
        remaining = self.remaining
        if remaining == self._count:
            self.first_at = time.monotonic()
        self.remaining = remaining = remaining - 1
        if not remaining:
            self.last_at = time.monotonic()
        if key[0] != FIRST_OF_KEYS or len(value) != self._size_bytes:
            assert value == FIRST, (key, value)

    def count(self, messages: int) -> None:
        """Note messages whose keys and values were touched by column."""
        if self.remaining == self._count:
            self.first_at = time.monotonic()
        self.remaining -= messages
        if self.remaining <= 0:
            self.last_at = time.monotonic()


class StampedHandling(Handling):
    """Messages whose values begin with the time of their send."""

    def __init__(self, count: int, size_bytes: int) -> None:
        super().__init__(count, size_bytes)
        self.took_ms: list[float] = []

    def message(self, key: bytes, value: bytes) -> None:
        """Handle a message, and note how long it took from its send."""
        if value != FIRST:
            sent_ns = int.from_bytes(value[:8], "little")
            self.took_ms.append((time.monotonic_ns() - sent_ns) / 1e6)
        super().message(key, value)


class System(ABC):
    """A system in a setting. Its servers are children of the measuring process, and end with
    `stop`.
    """

    title: ClassVar[str]
    client: ClassVar[str]
    """`module:class` of its client."""
    durability: ClassVar[Durability]
    promise: ClassVar[str]
    """What an ack of a send means in this setting, for one server with one disk."""
    settings: ClassVar[str]
    """What differs from the defaults, of servers and clients, in words."""
    sends_per_second: ClassVar[int]
    """Roughly; how many messages a take has follows from it."""
    senders: ClassVar[tuple[str, ...]] = ("each",)
    """Ways to send as fast as there is room; the first is that of every other take."""
    handlers: ClassVar[tuple[str, ...]] = ("each",)
    """Ways to take messages; the first is that of every other take."""
    loop: ClassVar[str] = "asyncio"

    def __init__(self, home: Path) -> None:
        self.home = home
        """The folder that `home.sh` filled."""
        self.where: dict[str, Any] = {}
        """Addresses, for clients."""
        self._children: list[subprocess.Popen[bytes]] = []

    @classmethod
    @abstractmethod
    def missing_text(cls, home: Path) -> str:
        """Return what is missing on this machine, as text; "" if nothing is."""

    @classmethod
    @abstractmethod
    def versions(cls, home: Path) -> dict[str, str]:
        """Program or library to its version."""

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Start it on an empty folder, and return once it serves."""

    @abstractmethod
    def create(self, topics: Sequence[str], partitions: int) -> None:
        """Make topics, where clients do not."""

    def leader(self, topic: str) -> int:
        """Return the pid of a server whose loss stops a part of what is sent to a topic, until
        another server takes its place. Only systems with copies have one.
        """
        raise NotImplementedError(f"{self.title} has no server that could be replaced")

    def wait_until(self, holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Wait until a server is ready; one that has ended never is."""

        def ready() -> bool:
            for child in self._children:
                if child.poll() is not None:
                    raise ChildProcessError(f"{what} ended with status {child.returncode}")
            return holds()

        wait_until(ready, what, seconds)

    def kill_leader(self, topic: str) -> None:
        """Kill the leader with all its processes, as the loss of a machine does."""
        for pid in process_tree(self.leader(topic)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Every process of it."""
        return [pid for child in self._children for pid in process_tree(child.pid)]

    def stop(self) -> None:
        """End all of it."""
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
        for child in reversed(self._children):
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                for pid in process_tree(child.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                child.wait()
        self._children.clear()

    def spawn(self, log: Path, *command: str, **environment: str) -> None:
        """Start a server process that logs to a file and works in the log's folder."""
        with log.open("ab") as file:
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=os.environ | environment,
                cwd=log.parent,
            )
        self._children.append(child)


class Client(ABC):
    """Runs in a process of its own. All is async; where a library blocks, so does the method."""

    library: str
    """What `load` imports: "module:name"."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.where: dict[str, Any] = job["where"]
        self.topic: str = job["topic"]
        self.partitions: int = job["partitions"]
        self.sender: str = job["sender"]
        self.handler: str = job["handler"]

    def load(self) -> None:
        """Import the library of the system, as a program does once, before it opens anything."""
        module, name = self.library.split(":")
        getattr(importlib.import_module(module), name)

    @abstractmethod
    async def open_producer(self) -> None:
        """Connect and send a message, so that everything is known that a first send has to ask
        for.
        """

    @abstractmethod
    async def send_all(self, value: bytes, count: int) -> None:
        """Send as fast as there is room, keys in turn; return once every message is acked."""

    @abstractmethod
    async def send(self, key: bytes, value: bytes) -> None:
        """Send a message, and wait for its ack."""

    @abstractmethod
    async def post(self, key: bytes, value: bytes) -> None:
        """Send without waiting for the ack."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Let time pass; acks are taken meanwhile."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until everything posted is acked."""

    @abstractmethod
    async def close_producer(self) -> None:
        """Disconnect."""

    @abstractmethod
    async def consume(self, handle: Handling, ready: Ready) -> None:
        """
        Read the topic from its beginning as a consumer that keeps its place, until all messages are
        handled and that is committed.
        """

    @abstractmethod
    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        """Open a consumer with a stored position, ready for messages; return a function, maybe
        async, that closes it.
        """


def encode_message(key: bytes, value: bytes) -> bytes:
    """Key and value in one, for systems without keys: cheaper than a header or a field of its
    own.
    """
    return len(key).to_bytes(2, "big") + key + value


def decode_message(data: bytes) -> tuple[bytes, bytes]:
    """Key and value again."""
    end = 2 + int.from_bytes(data[:2], "big")
    return data[2:end], data[end:]


def client_version(home: Path, name: str) -> str:
    """Return the version of a library in the home's client folder; "" if it is not installed."""
    for distribution in importlib.metadata.distributions(name=name, path=[str(home / "clients")]):
        return distribution.version
    return ""


def first_line_of(*command: str) -> str:
    """Return the first line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter((done.stdout or done.stderr).splitlines()), "").strip()
