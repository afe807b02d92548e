"""An in-memory cluster with virtual time: the real metaserver and brokers, and the programs of a
test.

    story(cluster) ─▶ clients, created as usual with cluster.address
                   ─▶ cluster.start(function, …)   separate programs, which can be killed
                   ─▶ faults, and `await asyncio.sleep(600)`, which takes no real time

The test, the programs and the servers run as simulated processes in one event loop. The seed
determines the order in which ready processes run, and the network delays, so the same seed repeats
the run.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..admin import Admin
from ..admin.parked_views import ParkedKeyView
from ..broker.offline.promotion import promote_candidate, read_candidate, wait_for_promotion
from ..broker.storage.copy_file import read_copy_file
from ..consumer import Reader
from ..metaserver.settings import MetaserverSettings
from ..protocol.address import VIRTUAL_DOMAIN
from ..protocol.control import SubjectView
from ..protocol.copies import COPIES_MAX
from ..protocol.errors import (
    ConfigError,
    InvalidRequestError,
    Reason,
    StoryError,
)
from ..protocol.message import Message
from ..rpc.environment import AMBIENT
from .loop import StoryLoop
from .machines.loop import Process, StuckError
from .machines.network import Internet
from .programs import (
    BrokerProgram,
    ClientProgram,
    FollowerProgram,
    MetaserverProgram,
    StoryProgram,
    call_async,
    check_story,
)
from .real_world import refuse_real_world
from .waiting import waiting_lines

P = ParamSpec("P")
T = TypeVar("T")
TEST = "test"
"""The name of the program that runs the story itself."""
BROKERS_MAX = 100
LIMIT_S_MAX = 1e100
"""The maximum finite limit in seconds; infinity means no limit."""
POLL_S = 0.01
EVERY_S_MIN = 0.000_001
"""The minimum pause in `until`, in seconds; without a pause, virtual time would not advance."""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, because finalizers would otherwise run at times that the seed
    does not determine.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Test(StoryProgram):
    """The story itself as a program in the network; it ends with the run."""

    async def _main(self) -> None:
        raise AssertionError("the cluster runs it")

    def begin(self) -> Process:
        """Start the process of the story, and return it."""
        process = self._process = Process(self.name, context=copy_context())
        process.context.run(AMBIENT.set, self._environment(process))
        return process


class VirtualCluster:
    """
    An in-memory cluster for one story.

    Attributes:
        address: the metaserver's address, for `Producer(cluster.address)`; it can only be reached
            in the story.
        seed: determines the run.
        metaserver, brokers: the servers, which are running when the story begins.
        copies: the followers that keep copies of the brokers' disks.
        test: the story itself as a program, for use with `cut`.
    """

    def __init__(
        self,
        *,
        brokers: int = 1,
        copies: int = 1,
        seed: int | None = 0,
        auto_create: str = "off",
        limit_s: float = 3_600.0,
        real_limit_s: float = 60.0,
    ) -> None:
        """
        Create a cluster in which `run` can run a story.

        Args:
            brokers: the number of brokers; each has its own broker group, "g0", "g1", …
            copies: the number of data folders of each broker group, 1 to 5. With 2, acks wait for
                one copy, and `lose_disk` loses nothing.
            seed: determines the run. None draws a seed, which is printed if the story fails.
            auto_create: "off", or a pattern for names of subjects that are created by their first
                message.
            limit_s: the maximum duration of the story in virtual seconds.
            real_limit_s: the maximum duration of the story in real seconds. It is not enforced
                while code runs without awaiting.

        Raises:
            ConfigError: an argument is out of range.
        """
        _check_options(brokers, copies, seed, limit_s=limit_s, real_limit_s=real_limit_s)
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._has_run = False
        self._loop = StoryLoop(self._rng("turns"), limit_s=limit_s, real_limit_s=real_limit_s)
        self._loop.exit_callback = self._on_exit
        self._internet = Internet(self._loop, self._rng("network"))
        self.address = f"metaserver{VIRTUAL_DOMAIN}:7000"
        settings = MetaserverSettings(
            data=Path("metaserver"),
            auto_create=auto_create,
            insecure_network=True,  # brokers have names
            # There is only one metaserver, which makes every change itself, so it rarely needs to
            # poll for changes.
            broker_heartbeat_ms=15_000,
            broker_ttl_ms=30_000,
            heartbeat_ms_max=10_000,
            poll_ms=30_000,
            repair_ms=30_000,
            expire_ms=300_000,
        )
        self.metaserver = MetaserverProgram(
            *self._program_arguments("metaserver"), address=self.address, settings=settings
        )
        self.brokers = tuple(
            BrokerProgram(
                *self._program_arguments(f"broker {index}"),
                group=f"g{index}",
                address=f"g{index}{VIRTUAL_DOMAIN}:8000",
                meta=self.address,
            )
            for index in range(brokers)
        )
        self.copies = tuple(
            FollowerProgram(
                *self._program_arguments(f"copy {number} of {broker.group}"),
                group=broker.group,
                meta=self.address,
            )
            for broker in self.brokers
            for number in range(1, copies)
        )
        self.test: StoryProgram = _Test(*self._program_arguments(TEST))
        self._clients: list[ClientProgram] = []

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed} {purpose}")

    def _program_arguments(self, name: str) -> tuple[Internet, str, str]:
        return self._internet, name, f"{self.seed} {name}"

    def __repr__(self) -> str:
        return (
            f"<VirtualCluster of {len(self.brokers)} brokers, seed {self.seed}, at "
            f"{self.now_s:.3f} s>"
        )

    # ── running ───────────────────────────────────────────────────────────────────────────────────
    def run(self, story: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """
        Run an async function in virtual time, and return its result. All programs end with it. Each
        cluster can run only one story.

        Raises:
            The story's exception, with notes about the seed and failed programs.
            StoryError: a program ended with an exception that no `wait` raised; the story exceeded
                a limit, or used a real sleep, thread or socket; the cluster has already run a
                story; or another event loop is running.
            InvalidRequestError: `story` is not an async function.
        """
        check_story(story, "cluster.run(story)")
        self._check_first()
        try:
            with refuse_real_world(self._abort_story), _no_garbage_collection():
                result = self._run(partial(story, *args, **kwargs))
        except BaseException as error:
            for line in self._notes():
                error.add_note(line)
            raise
        finally:
            self._dispose()
        self._check_programs()
        return result

    def _check_first(self) -> None:
        if self._has_run:
            raise StoryError("a cluster has one story: create another cluster")
        if asyncio._get_running_loop() is not None:
            raise StoryError(
                "an event loop is running here: call `run` from a plain function, or have the "
                "fixture keylane_cluster run an async test"
            )
        self._has_run = True

    def _run(self, story: Callable[[], Awaitable[T]]) -> T:
        loop = self._loop
        assert isinstance(self.test, _Test)
        process = self.test.begin()
        for program in (self.metaserver, *self.brokers, *self.copies):
            program.start()
        task = loop.create_task(self._run_story(story), name=TEST, context=process.context.copy())
        try:
            return loop.run_until_complete(task)
        except StuckError as error:
            lines = waiting_lines(asyncio.all_tasks(loop))
            text = "\n".join([f"the story did not end: {error}", *lines])
            raise StoryError(Reason.STORY_STUCK, text, virtual_s=loop.now) from None

    async def _run_story(self, story: Callable[[], Awaitable[T]]) -> T:
        async with Admin(self.address) as admin:

            async def ready() -> bool:
                return len((await admin.list_brokers()).brokers) == len(self.brokers)

            await self.until(ready, every_s=POLL_S)
            if self.copies:
                await self._wait_for_copies(admin)
        result: T = await call_async(story)
        return result

    async def _wait_for_copies(self, admin: Admin) -> None:
        """Wait until acks of each broker group wait for all of its copies."""
        per_group = len(self.copies) // len(self.brokers)
        for broker in self.brokers:
            await admin.set_copies(broker.group, 1 + per_group)

            async def joined(group: str = broker.group) -> bool:
                return len((await admin.copies(group)).members) == per_group

            await self.until(joined, every_s=POLL_S)

    def _abort_story(self, error: StoryError) -> None:
        """Make the loop stop with the error, because the code under test might swallow it or retry
        forever.
        """
        self._loop.fatal_error = error

    def _on_exit(self, process: Process, error: SystemExit) -> None:
        owner = process.owner
        if not isinstance(owner, StoryProgram):
            raise error
        if process.alive:
            owner.exited(error)

    def _notes(self) -> list[str]:
        failed = [
            f"{program.name} had failed: {program.unraised_error!r}"
            for program in self._failed_programs()
        ]
        return [
            *failed,
            f"keylane.testing: seed {self.seed}, after {self.now_s:.3f} virtual seconds",
        ]

    def _failed_programs(self) -> list[StoryProgram]:
        programs: list[StoryProgram] = [
            self.metaserver,
            *self.brokers,
            *self.copies,
            *self._clients,
        ]
        return [program for program in programs if program.unraised_error is not None]

    def _check_programs(self) -> None:
        for program in self._failed_programs():
            error = StoryError(
                Reason.PROGRAM_FAILED,
                f"{program.name} ended with {program.unraised_error!r}",
                program=program.name,
            )
            error.add_note(self._notes()[-1])
            raise error from program.unraised_error
        for fault in self._loop.faults:
            raise StoryError(Reason.PROGRAM_FAILED, f"a task ended with {fault!r}") from (
                fault if isinstance(fault, BaseException) else None
            )

    def close(self) -> None:
        """Release all resources, if no story has been run."""
        if not self._has_run:
            self._has_run = True
            self._dispose()

    def _dispose(self) -> None:
        """End all tasks immediately, with logging disabled because they may log errors."""
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            self._loop.dispose()
        finally:
            logging.disable(disabled)

    # ── programs and faults ───────────────────────────────────────────────────────────────────────
    def start(
        self, function: Callable[P, Awaitable[Any]], /, *args: P.args, **kwargs: P.kwargs
    ) -> ClientProgram:
        """
        Start an async function as a separate program on its own machine.

        The program is named after its function. A second program for a function `work` is named
        "work 2".

        Raises:
            InvalidRequestError: `function` is not a function. If it is a function but not async,
                the program ends with this error.
        """
        check_story(function, "cluster.start(work)")
        base_name = getattr(function, "__name__", type(function).__name__)
        taken_names = {program.name for program in self._clients}
        names = (
            base_name if number == 1 else f"{base_name} {number}"
            for number in range(1, len(taken_names) + 2)
        )
        name = next(name for name in names if name not in taken_names)
        program = ClientProgram(*self._program_arguments(name), partial(function, *args, **kwargs))
        self._clients.append(program)
        program.start()
        return program

    async def lose_disk(self, broker: BrokerProgram) -> None:
        """
        Crash a broker, and lose its disk for good: once the broker counts as silent, after 30 s, a
        copy that acks have waited for is promoted, and the broker runs on it at the same address.
        The follower begins a new copy.

        Raises:
            InvalidRequestError: it is not a broker of this cluster, or has no copies.
            StoryError: acks have not waited for any of its copies.
        """
        if broker not in self.brokers:
            raise InvalidRequestError(
                f"lose_disk takes a broker, such as cluster.brokers[0], not {broker!r:.60}"
            )
        followers = [each for each in self.copies if each.group == broker.group]
        if not followers:
            raise InvalidRequestError(
                "lose_disk would lose acked messages: create the cluster with copies=2"
            )
        broker.replace_disk()
        async with Admin(self.address) as admin:
            members = (await admin.copies(broker.group)).members
            for follower in followers:
                copy = read_copy_file(follower.disk)
                if copy is not None and copy.copy_id in members:
                    break
            else:
                raise StoryError(f"acks of {broker.name} have not waited for any of its copies")
            follower.kill()
            candidate = read_candidate(follower.disk)
            ask = partial(
                admin.promote_copy,
                broker.group,
                candidate.copy.copy_id,
                broker_id=candidate.broker_id,
                log_end=candidate.log_end,
            )
            await wait_for_promotion(ask, pause_s=1.0)
        promote_candidate(follower.disk, candidate)
        broker.disk = follower.disk
        follower.replace_disk()
        broker.start()
        follower.start()

    def cut(self, program: StoryProgram, *others: StoryProgram) -> None:
        """
        Cut a program off from `others`, or from all programs, in both directions. Nothing arrives
        until `heal` is called.

        Raises:
            InvalidRequestError: an argument is not a program in this cluster; nothing is cut.
        """
        known_programs = self._programs()
        for target in (program, *others):
            if not any(target is other for other in known_programs):
                raise InvalidRequestError(
                    "cut takes programs, such as cluster.brokers[0], cluster.test or the result of "
                    f"cluster.start, not {target!r:.60}"
                )
        for other in others or self._programs():
            if other is not program:
                self._internet.cut_link(program.name, other.name)
                self._internet.cut_link(other.name, program.name)

    def heal(self) -> None:
        """Heal all cuts. Some of the messages in flight arrive late, and some connections break."""
        self._internet.heal()

    def _programs(self) -> list[StoryProgram]:
        return [self.test, self.metaserver, *self.brokers, *self.copies, *self._clients]

    # ── time ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def now_s(self) -> float:
        """The virtual time in seconds since the cluster was created."""
        return self._loop.now

    def now(self) -> datetime:
        """Return the wall-clock time of the cluster's programs, for use in `deliver_at` and a
        reader's `start=`.
        """
        wall_ms = self.test.clock.wall_ms()
        return datetime.fromtimestamp(wall_ms / 1000, UTC)

    async def until(
        self, condition: Callable[[], Any], *, within_s: float = 60.0, every_s: float = 0.05
    ) -> Any:
        """
        Wait until `condition()` is true, and return its result. `condition` may be an async
        function.

        Args:
            within_s: the maximum time to wait, in virtual seconds.
            every_s: the pause between two calls, in virtual seconds.

        Raises:
            StoryError: the condition did not become true in time.
            Any error of `condition`, which is not called again.
            InvalidRequestError: `condition` is not a function, or a time is not a number of
                seconds.
        """
        if not callable(condition):
            raise InvalidRequestError(
                f"until takes a function, which it calls repeatedly, not {condition!r:.60}: "
                f"until(lambda: ...)"
            )
        for name, given_value, shortest_s in (
            ("within_s", within_s, 0.0),
            ("every_s", every_s, EVERY_S_MIN),
        ):
            if not _is_seconds(given_value) or not given_value >= shortest_s:
                raise InvalidRequestError(
                    f"{name} must be a number of seconds from {shortest_s:g}, not "
                    f"{given_value!r:.40}"
                )
        end_s = self.now_s + within_s
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            if self.now_s >= end_s:
                text = f"the condition was still {value!r:.200} after {within_s:g} virtual seconds"
                raise StoryError(Reason.CONDITION_NOT_MET, text, within_s=within_s)
            await asyncio.sleep(every_s)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────
    async def create_subject(self, subject: str, **options: Any) -> SubjectView:
        """Create a subject; see `Admin.create_subject`."""
        async with Admin(self.address) as admin:
            return await admin.create_subject(subject, **options)

    async def messages(
        self, subject: str, *, key: bytes | str | None = None
    ) -> list[Message[bytes]]:
        """Return the stored messages of a subject, or only those with a key. The messages of each
        partition are in order.
        """
        async with Reader(self.address, subject, key=key) as reader:
            return [message async for message in reader]

    async def lag(self, subject: str, group: str) -> int:
        """
        Return the number of messages that a group has not acked yet; see `Admin.lag`.

        Raises:
            GroupUnknownError: no consumer of the group has joined yet. Open the consumer, or create
                the group, first.
        """
        async with Admin(self.address) as admin:
            return await admin.lag(subject, group)

    async def parked(self, subject: str, group: str) -> list[ParkedKeyView]:
        """
        Return the keys that a group has set aside; see `Admin.parked`.

        Raises:
            GroupUnknownError: no consumer of the group has joined yet. Open the consumer, or create
                the group, first.
        """
        async with Admin(self.address) as admin:
            return [view async for view in admin.parked(subject, group)]


def run(story: Callable[[VirtualCluster], Awaitable[T]], /, **options: Any) -> T:
    """
    Run `story(cluster)` in a new cluster. `options` are the arguments of VirtualCluster.

    Raises:
        The same errors as `VirtualCluster.run`.
    """
    check_story(story, "run(story)")
    cluster = VirtualCluster(**options)
    return cluster.run(story, cluster)


def _check_options(brokers: Any, copies: Any, seed: object, **limits: Any) -> None:
    """Raise ConfigError if an argument of a cluster is out of range."""
    for name, given, most in (("brokers", brokers, BROKERS_MAX), ("copies", copies, COPIES_MAX)):
        if type(given) is not int or not 1 <= given <= most:
            raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {given!r:.40}")
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"seed must be a whole number, or None, not {seed!r:.40}")
    for name, limit in limits.items():
        if not _is_seconds(limit) or not limit > 0:
            raise ConfigError(f"{name} must be a number of seconds above 0, not {limit!r:.40}")


def _is_seconds(value: Any) -> bool:
    """Return True for a number that can be used as seconds, including infinity."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (abs(value) <= LIMIT_S_MAX or value == math.inf)
