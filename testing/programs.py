"""The programs of a virtual cluster: the metaserver, the brokers, and the user's programs. Each can
be stopped, killed and restarted.

    start ─▶ running ─▶ ended, also by stop (SIGTERM), kill (SIGKILL), or crash (with its machine)
        ─▶ start …

Each program has its own machine, clock and name. A paused program (SIGSTOP) does nothing until it
is resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..broker.app import Pools, serving_broker
from ..broker.copies.follower import Follower
from ..broker.settings import BrokerSettings
from ..broker.storage.files import AppendFile
from ..metaserver.services import build_services
from ..metaserver.settings import MetaserverSettings
from ..metaserver.sql.clock_restart import give_time_back, restart_times_after_boot
from ..protocol.address import META_DEFAULT
from ..protocol.errors import InvalidRequestError, StorageError, StoryError
from ..rpc.access.guard import Guard
from ..rpc.client import MetaClient
from ..rpc.environment import AMBIENT, Environment
from ..rpc.operating.metrics import ServerMetrics
from ..rpc.plane.prompt import DataService
from ..rpc.server import ControlRoute
from .machines.database import MemoryDatabase
from .machines.disk import SimDisk
from .machines.loop import PROCESS, Process
from .machines.machine import Machine, SimStopSignals, send_stop
from .machines.network import Internet, Listener, SimNetwork

BOOT_S = 10.0
"""The uptime in seconds that a machine has when its program starts."""


def check_story(function: object, call: str) -> None:
    """Raise InvalidRequestError if `function` is not callable, with a hint if it is a coroutine."""
    if inspect.iscoroutine(function):
        function.close()
        raise InvalidRequestError(
            f"{call} takes the async function itself, followed by its arguments, and calls it"
        )
    if not callable(function):
        raise InvalidRequestError(f"{call} takes an async function, not {function!r:.60}")


async def call_async(function: Callable[[], Any]) -> Any:
    """
    Call an async function, and return its result.

    Raises:
        InvalidRequestError: it is a plain function, which has been called anyway.
    """
    result = function()
    if not inspect.isawaitable(result):
        name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
        raise InvalidRequestError(
            f"{name} returned {result!r:.60}: a story and a program are async "
            f"functions, `async def`"
        )
    return await result


class Killed(SystemExit):
    """Raised in a program that kills itself, so that none of its remaining code runs."""


class StoryProgram(ABC):
    """
    One program of a virtual cluster.

    Attributes:
        name: the name of the program, which also appears in errors.
        error: the exception that ended the program; None if it is running, was ended from outside,
            or returned.
    """

    def __init__(self, internet: Internet, name: str, seed: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._seed = seed
        self._internet = internet
        self._loop = internet.loop
        self._machine = Machine(internet.loop, name, rate=1.0, boot_s=BOOT_S)
        self._process = Process(name)
        self._process.alive = False
        self._start_count = 0
        self._runs: list[tuple[Process, asyncio.Task[Any]]] = []
        """The process and task of each start. They are kept so that nothing of a killed program is
        destroyed during the story.
        """
        self._has_raised = False
        """True if `wait` has already raised the error."""
        self._ended = asyncio.Event()
        self._rng = random.Random(seed)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {self._state()}>"

    def _state(self) -> str:
        if not self.running:
            return "not running" if self.error is None else f"ended with {self.error!r}"
        return "paused" if self._process.paused else "running"

    @property
    def running(self) -> bool:
        """True while the program is running, even if it is paused."""
        return self._process.alive

    @property
    def clock(self) -> Machine:
        """The clocks of the program's machine."""
        return self._machine

    @property
    def unraised_error(self) -> BaseException | None:
        """The exception that ended the program, unless `wait` has already raised it."""
        return None if self._has_raised else self.error

    def start(self) -> None:
        """
        Start the program, or restart it with its old disk and empty memory.

        Raises:
            StoryError: the program is already running.
        """
        if self.running:
            raise StoryError(f"{self.name} is running")
        if not self._machine.up:
            self._machine.reboot(BOOT_S)
        self._machine.up = True
        self.error = None
        self._has_raised = False
        self._start_count += 1
        self._rng = random.Random(f"{self._seed} {self._start_count}")
        process = self._process = Process(self.name, context=copy_context())
        process.owner = self
        self._ended = asyncio.Event()
        process.context.run(AMBIENT.set, self._environment(process))
        task = self._loop.create_task(self._main(), name=self.name, context=process.context.copy())
        task.add_done_callback(partial(self._on_return, process), context=self._loop.world.context)
        self._runs.append((process, task))

    def _environment(self, process: Process) -> Environment:
        return Environment(
            network=SimNetwork(self._internet, process),
            clock=self._machine,
            rng=self._rng,
            draw_identity=self._rng.getrandbits,
            stop_signals=SimStopSignals,
            in_place=True,
        )

    @abstractmethod
    async def _main(self) -> Any:
        """Run the program's code."""

    def _on_return(self, process: Process, task: asyncio.Task[Any]) -> None:
        """End the program when its main task is done."""
        error = None if task.cancelled() else task.exception()
        if process.alive:
            self.error = error
            self._end(machine_down=False)

    async def wait(self) -> Any:
        """
        Wait until the program ends, and return the result of its function, or None if it was
        killed.

        Raises:
            The exception that ended the program.
        """
        await self._ended.wait()
        if self.error is not None:
            self._has_raised = True
            raise self.error

    async def stop(self) -> None:
        """Send SIGTERM, and wait until the program ends. A program without a handler ends
        immediately.
        """
        if self.running:
            if not send_stop(self._process):
                self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Kill the program, like SIGKILL. It releases nothing, and its connections break."""
        self._end_now(machine_down=False)

    def crash(self) -> None:
        """Crash the program together with its machine. Peers are not notified, and the disk may
        lose unsynced data.
        """
        self._end_now(machine_down=True)

    def pause(self) -> None:
        """Pause the program until `resume` is called, like SIGSTOP. Its clock keeps running."""
        self._process.paused = True

    def resume(self) -> None:
        """Resume a paused program."""
        self._loop.resume(self._process)

    def exited(self, error: SystemExit) -> None:
        """End the program after its code has called sys.exit. A status other than 0 is an error."""
        if error.code:
            self.error = error
        self._end(machine_down=False)

    def _end_now(self, *, machine_down: bool) -> None:
        if not self.running:
            return
        self._end(machine_down=machine_down)
        if PROCESS.get(None) is self._process:
            self._raise_killed()

    def _raise_killed(self) -> NoReturn:
        raise Killed(f"{self.name} has killed itself")

    def _end(self, *, machine_down: bool) -> None:
        self._process.kill()
        self._machine.up = not machine_down
        self._internet.remove_process(self._process, machine_down=machine_down)
        self._ended.set()


class ClientProgram(StoryProgram):
    """A user's program: an async function and its arguments."""

    def __init__(
        self, internet: Internet, name: str, seed: str, function: Callable[[], Awaitable[Any]]
    ) -> None:
        super().__init__(internet, name, seed)
        self._function = function
        self._result: Any = None

    async def _main(self) -> None:
        self._result = None
        self._result = await call_async(self._function)

    async def wait(self) -> Any:
        """See `StoryProgram.wait`."""
        await super().wait()
        return self._result


class MetaserverProgram(StoryProgram):
    """The metaserver, whose database survives restarts."""

    def __init__(
        self,
        internet: Internet,
        name: str,
        seed: str,
        *,
        address: str,
        settings: MetaserverSettings,
    ) -> None:
        super().__init__(internet, name, seed)
        self.address = address
        self._settings = settings
        self._database: MemoryDatabase | None = None

    async def _main(self) -> None:
        # Only created when the story begins, because all clusters of a process share one database
        # in turn.
        self._database = self._database or MemoryDatabase(self._machine)
        self._database.transact(
            restart_times_after_boot,
            f"boot {self._machine.boots}",
            broker_ttl_ms=self._settings.broker_ttl_ms,
        )
        self._database.transact(
            give_time_back, away_ms=None, broker_ttl_ms=self._settings.broker_ttl_ms
        )
        network = SimNetwork(self._internet, self._process)
        services = build_services(
            self._database, network, self._settings, clock=self._machine, rng=self._rng
        )
        services.catalogue.trust_database()
        listener = Listener(self._process, self._machine, services.routes)
        # A program under test may use the other one by default.
        for address in (self.address, META_DEFAULT):
            self._internet.listen(address, listener)
        periodic = asyncio.create_task(services.periodic_tasks.run())
        with SimStopSignals() as stop:
            await stop.event.wait()
        services.close()
        periodic.cancel()
        await asyncio.wait([periodic])
        await services.operations.stop()


async def _in_place(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run blocking code in the event loop, after other ready tasks."""
    await asyncio.sleep(0)
    return function(*args)


T = TypeVar("T")


class SyncsInTasks:
    """
    Runs disk syncs in tasks; see `QuickSync`.

    Args:
        blocking: a coroutine function that calls a blocking function, possibly in a later iteration
            of the loop.
    """

    def __init__(self, run_blocking: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._run_blocking = run_blocking
        self._task: asyncio.Task[None] | None = None

    def is_ready(self) -> bool:
        """See `QuickSync`."""
        return True

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """See `QuickSync`."""
        return function(*args)

    def sync(self, file: AppendFile, done: Callable[[Exception | None], None]) -> None:
        """See `QuickSync`."""
        self._task = asyncio.get_running_loop().create_task(self._sync(file, done), name="sync")

    async def _sync(self, file: AppendFile, done: Callable[[Exception | None], None]) -> None:
        error: Exception | None = None
        try:
            await self._run_blocking(file.fdatasync)
        except StorageError as failure:
            error = failure
        done(error)


IN_PLACE = Pools(_in_place, _in_place, _in_place, SyncsInTasks(_in_place))


class DiskProgram(StoryProgram):
    """
    A program with a disk that survives restarts.

    Attributes:
        group: the name of its broker group.
        disk: its data folder.
    """

    def __init__(self, internet: Internet, name: str, seed: str, *, group: str, meta: str) -> None:
        super().__init__(internet, name, seed)
        self.group = group
        self.disk = _empty_disk()
        self._settings = BrokerSettings(group=group, data=Path(name), meta=(meta,))

    def fill_disk(self) -> None:
        """Fill the disk, so that messages are refused until `empty_disk` is called."""
        self.disk.free_space = 0

    def empty_disk(self) -> None:
        """Free the space on the disk again."""
        self.disk.free_space = None

    def _end(self, *, machine_down: bool) -> None:
        super()._end(machine_down=machine_down)
        self.disk.close()
        if machine_down:
            self.disk = self.disk.disk_after_crash(self._rng)

    def replace_disk(self, disk: SimDisk | None = None) -> None:
        """Crash the program with its machine, and give the machine another disk, by default an
        empty one.
        """
        self._end_now(machine_down=True)
        self.disk = disk or _empty_disk()


def _empty_disk() -> SimDisk:
    disk = SimDisk()
    # It counts as empty, so a broker needs no reserve.
    disk.total_space = disk.free_bytes()
    return disk


class FollowerProgram(DiskProgram):
    """A follower, which keeps a copy of the disk of its group's broker."""

    async def _main(self) -> None:
        self.disk.lock()
        network = SimNetwork(self._internet, self._process)
        follower = Follower(
            self.disk,
            self.group,
            meta=MetaClient(network, self._settings.meta),
            network=network,
            run_blocking=_in_place,
            clock=self._machine,
            rng=self._rng,
        )
        await follower.run()


class BrokerProgram(DiskProgram):
    """
    A broker.

    Attributes:
        address: the address of the broker, as `host:port`.
    """

    def __init__(
        self, internet: Internet, name: str, seed: str, *, group: str, address: str, meta: str
    ) -> None:
        super().__init__(internet, name, seed, group=group, meta=meta)
        self.address = address

    async def _main(self) -> None:
        broker = serving_broker(
            self.disk,
            self._settings,
            pools=IN_PLACE,
            network=SimNetwork(self._internet, self._process),
            clock=self._machine,
            rng=self._rng,
            naming_rng=self._rng,
            listen=self._serve_routes,
        )
        with SimStopSignals() as stop:
            async with broker:
                await stop.event.wait()

    @contextlib.asynccontextmanager
    async def _serve_routes(
        self,
        routes: Sequence[ControlRoute],
        service: DataService,
        _metrics: ServerMetrics,
        _guard: Guard | None,
    ) -> AsyncIterator[str]:
        listener = Listener(self._process, self._machine, routes, service)
        self._internet.listen(self.address, listener)
        yield self.address
