"""How often processes call each other: a loop without a pause is found, although each of its calls
takes time.
"""

from __future__ import annotations

from collections.abc import Callable

from keylane.checker.events import Event, Started
from keylane.protocol.frames import Append, Pull, Request
from keylane.testing.machines.loop import Process
from keylane.testing.machines.network import Internet

WINDOW_S = 5.0
CONTROLS_MAX = 300
"""Control calls of one path, and new connections, by one process, in such a window of true time."""
FRAMES_MAX = 1_000
"""Requests on its connections, likewise. Each is four times the most that ordinary seeds show."""
READS_MAX = 5_000
"""Of a reader, which asks each of its partitions again for each small chunk of any."""


class CallRates:
    """Counts calls in windows of true time; reports each process and kind of call with too many
    once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._window = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()

    @property
    def window(self) -> int:
        """The number of the window of the last call."""
        return self._window

    def note(self, now_s: float, process: str, kind: str, *, most: int) -> None:
        """Count a call of a process, which makes at most `most` in a window; queries in a path are
        not told apart.
        """
        window = int(now_s // WINDOW_S)
        if window != self._window:
            self._window = window
            self._counts.clear()
        who = (process, kind.partition("?")[0])
        count = self._counts[who] = self._counts.get(who, 0) + 1
        if count > most and who not in self._told:
            self._told.add(who)
            self._tell(
                f"hot loop: {process} asks {who[1]} more than {most} times in {WINDOW_S:.0f} s"
            )


class WatchedCalls:
    """
    Watches the calls of every process of a network.

    Attributes:
        appends: when a process last put an append to a partition on its way to a broker.
    """

    def __init__(self, internet: Internet) -> None:
        self._loop = internet.loop
        self._rates = CallRates(internet.loop.faults.append)
        self._begun = self._begun_before = 0
        """Handlers that began, and those of them before this window."""
        self.appends: dict[tuple[Process, int], float] = {}
        self.readers = {"operator"}
        """The names of processes that read in small chunks; the operator does once all is
        drained.
        """
        internet.on_call = self._called
        internet.on_frame = self._asked

    def _called(self, process: Process, call: str) -> None:
        self._rates.note(self._loop.now, process.name, call, most=CONTROLS_MAX)

    def recorded(self, event: Event) -> None:
        """Count the handlers that begin: a pull that brings one is none of a loop, however small
        pulls are.
        """
        self._begun += type(event) is Started

    def _asked(self, process: Process, request: Request, sent: bool) -> None:
        kind = type(request).__name__
        most = READS_MAX if process.name in self.readers else FRAMES_MAX
        if int(self._loop.now // WINDOW_S) != self._rates.window:
            self._begun_before = self._begun
        if type(request) is Pull:
            most += self._begun - self._begun_before
        self._rates.note(self._loop.now, process.name, kind, most=most)
        if sent and type(request) is Append:
            self.appends[process, request.partition_id] = self._loop.now
