"""Starts and stops the parts of a broker in order: data folder, store, server, registration,
retention.

A new broker process can be started before the old one is stopped. It loads its code, which takes
longer than the rest of the start, while the old process still serves, and then waits for the old
one to exit. Clients wait only for that exit and for the recovery of the data folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.clock import Clock, SystemClock
from ..protocol.control import SHORT_TEXT_CHARS_MAX, BrokerHeartbeat
from ..protocol.copies import HAND_OVER_MS, HandOver
from ..protocol.endpoints import (
    ACCESS_NEWS,
    BROKER,
    CHANGE_COPY_SET,
    NOTE_AUDIT,
    OFFER_PLACE,
)
from ..protocol.errors import AddressError, KeylaneError, Reason
from ..protocol.frames import CancelScheduled, Follow, Schedule
from ..protocol.http.access import AuditEvent, NoteAudit
from ..protocol.membership.versions import VERSION
from ..rpc.access.guard import Guard
from ..rpc.access.token_file import TokenFile
from ..rpc.client import MetaClient
from ..rpc.environment import DrawBits
from ..rpc.intake import HttpLimits
from ..rpc.listening import check_free
from ..rpc.network import Network
from ..rpc.operating.machine import machine_name
from ..rpc.operating.metrics import ServerMetrics, access_metrics
from ..rpc.operating.probes import metrics_route
from ..rpc.operating.served_network import ServedNetwork
from ..rpc.plane.prompt import DataService
from ..rpc.race import Race
from ..rpc.server import ControlRoute, Server, document_route, front_route
from ..rpc.threads.worker_thread import WorkerThread
from .control import BrokerControl, no_quotas
from .copies.copy_reads import CopyReads
from .copies.folding import Folding
from .copies.follow_service import FollowService
from .copies.follower import Follower
from .copies.hand_over import HandingOver
from .copies.placement import Site
from .copies.set_keeper import SetKeeper
from .health_port import answering_probes, follower_routes
from .metrics import (
    BrokerMetrics,
    collect_copies,
    collect_copy_reads,
    collect_copy_set,
    collect_cuts,
    collect_scheduled,
    expire_series_loop,
)
from .offline.promotion import demote_folder, promote_candidate
from .parking import Parking
from .peers import Peers
from .posting import MessagePosting
from .reading import MessageReading
from .registration import Registration
from .retention.loop import RetentionLoop
from .scheduled.agenda import ScheduledAgenda
from .scheduled.scheduler import Scheduler
from .scheduling import Scheduling
from .service import BrokerService
from .settings import BrokerSettings
from .storage.copy_file import is_copy
from .storage.data_folder import (
    FolderIdentity,
    Opening,
    begin_opening,
    claim_folder,
    has_copies,
    is_claimed,
    read_operators,
    record_heard,
    save_operators,
)
from .storage.fail_points import make_files
from .storage.files import Files, is_locked, restrict_permissions
from .storage.kernel_syncs import KernelSyncs
from .store.group_changes import mark_groups_incomplete, refuse_old_tokens
from .store.group_commit import RunBlocking
from .store.opening import Recovery
from .store.quick_sync import KernelQuickSync, QuickSync
from .store.store import Store

if TYPE_CHECKING:
    from .access.broker_guard import BrokerGuard


log = logging.getLogger("keylane.broker")

POLL_S = 0.01


async def wait_for_predecessor(settings: BrokerSettings) -> None:
    """
    Wait until no other process uses the data folder and the port, for at most `takeover_ms`.

    This reserves neither: the first process to take them wins, and any other is refused.

    Raises:
        AddressError: the broker can never listen on this address.
    """
    is_logged = False
    with suppress(TimeoutError):  # the start then fails with the precise error
        async with asyncio.timeout(settings.takeover_ms / 1000):
            while is_locked(str(settings.data)) or not _is_free(settings):
                if not is_logged and settings.takeover_ms:
                    log.warning("ready to take over: stop the broker that uses %s", settings.data)
                is_logged = True
                await asyncio.sleep(POLL_S)


def _is_free(settings: BrokerSettings) -> bool:
    try:
        check_free(settings.host, settings.port, anywhere=settings.is_open)
    except AddressError as error:
        if error.reason is Reason.INSECURE_HOST:
            raise
        return False
    return True


SWITCH_S = 0.0005
"""The interpreter's thread switch interval in seconds: how long a thread that has finished a disk
operation waits for a busy event loop. With Python's default of 5 ms the disk would idle.
"""
GC_THRESHOLDS = (10_000, 4, 200)
"""The thresholds of the garbage collector. Messages create no reference cycles, so it rarely needs
to run.
"""


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that serves requests."""

    address: str
    identity: FolderIdentity
    store: Store
    adopt: Callable[[BrokerSettings], None]
    """Applies those settings that may change while the broker runs: `settings.RELOADED`."""
    is_behind: asyncio.Event
    """See `Registration.is_behind`."""
    handing_over: HandingOver


class _Folder(NamedTuple):
    """A data folder opened for serving."""

    identity: FolderIdentity
    store: Store
    opening: Opening
    scheduler: Scheduler


class PromotedFolder(NamedTuple):
    """A data folder that was a copy until now."""

    files: Files
    recovery: Recovery | None
    """What was read of it while it was a copy."""


class Pools(NamedTuple):
    """Runs blocking calls of the store in threads."""

    commit: RunBlocking
    read: RunBlocking
    background: RunBlocking
    quick: QuickSync | None = None
    """Syncs small commits without the `commit` thread; None if the kernel does not support it."""


Listen = Callable[
    [Sequence[ControlRoute], DataService, ServerMetrics, Guard | None],
    AbstractAsyncContextManager[str],
]
"""Returns a context manager that serves the routes and the data plane, and yields the address as
host:port. The guard is None if there is no access control.
"""


@contextlib.asynccontextmanager
async def running_broker(
    settings: BrokerSettings,
    *,
    network: Network | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    promoted: PromotedFolder | None = None,
) -> AsyncIterator[RunningBroker]:
    """
    Recover the store, listen, and report to the metaserver. At the end of the block, stop in
    reverse order.

    The metaserver need not be reachable. A caller that passes a `network` must close it.

    Args:
        promoted: the data folder, if it was a copy until now.

    Raises:
        DataFolderError, CorruptLogError, AddressError, ConfigError: the broker cannot start.
    """
    await wait_for_predecessor(settings)
    check_free(settings.host, settings.port, anywhere=settings.is_open)
    served_network = ServedNetwork(settings)
    async with contextlib.AsyncExitStack() as stack:
        files = make_files(str(settings.data)) if promoted is None else promoted.files
        stack.callback(files.close)  # called last: the lock must outlive all threads
        clock = clock or SystemClock()
        pools = _create_pools(stack, settings, clock)
        broker = serving_broker(
            files,
            settings,
            pools=pools,
            network=network or _own_network(stack, settings, served_network),
            clock=clock,
            rng=rng or random.SystemRandom(),
            naming_rng=random.SystemRandom(),
            listen=partial(_run_server, settings, served_network),
            on_claimed=partial(restrict_permissions, str(settings.data)),
            begun=None if promoted is None else promoted.recovery,
        )
        running = await stack.enter_async_context(broker)

        def adopt(changed: BrokerSettings) -> None:
            running.adopt(changed)
            served_network.adopt(changed)

        yield replace(running, adopt=adopt)


@contextlib.asynccontextmanager
async def _run_server(
    settings: BrokerSettings,
    served_network: ServedNetwork,
    routes: Sequence[ControlRoute],
    service: DataService,
    metrics: ServerMetrics,
    guard: Guard | None,
) -> AsyncIterator[str]:
    limits = HttpLimits(connections_max=settings.http_connections_max)
    server = Server(
        routes,
        data_handler=service.handle,
        data_begin=service.begin,
        limits=limits,
        on_refusal=metrics.count_refusal,
        time_call=metrics.time_call,
        serving=settings,
        tls=served_network.tls,
        guard=guard,
        data_connections_max=settings.data_connections_max,
    )
    metrics.add(served_network.collect)
    metrics.connections = lambda: server.connections
    metrics.connections_max = server.data_connections_max
    await server.start(settings.host, settings.port)
    watch_task = asyncio.create_task(metrics.watch_loop())
    try:
        async with answering_probes(settings, served_network, routes, guard):
            yield server.address
    finally:
        await _cancel(watch_task)
        await server.stop()


@contextlib.asynccontextmanager
async def serving_broker(
    files: Files,
    settings: BrokerSettings,
    *,
    pools: Pools,
    network: Network,
    clock: Clock,
    rng: random.Random,
    naming_rng: random.Random,
    listen: Listen,
    on_claimed: Callable[[], None] = lambda: None,
    begun: Recovery | None = None,
) -> AsyncIterator[RunningBroker]:
    """
    Run a broker like `running_broker`, but with the given files, threads and network.

    Args:
        rng: draws the broker's id and the backoff delays.
        naming_rng: draws the name of this opening and the ids of scheduled messages; no two
            openings may draw the same values.
        on_claimed: called once the folder is locked and is known to belong to this broker, before
            the store is read.
        begun: what was read of the store while the folder was a copy.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = (files, settings, clock, rng, naming_rng, pools)
        folder_state = await pools.commit(
            partial(_open, *folder, on_claimed=on_claimed, begun=begun)
        )
        store, scheduler = folder_state.store, folder_state.scheduler
        stack.push_async_callback(store.close)

        def report() -> BrokerHeartbeat:
            return _build_report(
                folder_state,
                settings,
                address,
                untold=retention.untold,
                registration=registration,
                keeper=keeper,
            )

        meta = MetaClient(network, settings.meta)
        broker_guard = _open_guard(
            folder_state, files, settings, meta, clock=clock, pools=pools, address=lambda: address
        )
        registration = Registration(
            meta,
            report,
            rng=rng,
            clock=clock,
            on_accepted=lambda: pools.background(record_heard, files, folder_state.opening),
            on_missed=lambda: mark_groups_incomplete(store),
            on_fence=lambda token: refuse_old_tokens(store, token),
            on_access=lambda news: (
                None if broker_guard is None else broker_guard.judge.update_news(news)
            ),
            awaits_copies=has_copies(files),
        )
        retention = RetentionLoop(
            store,
            files,
            settings,
            clock=clock,
            run_commit=pools.commit,
            run_read=pools.background,
            folder_ownership=registration,
            calendar=scheduler.calendar,
        )
        service = BrokerService(store, clock=clock, folder_ownership=registration)
        following = FollowService(
            store,
            broker_group=folder_state.identity.broker_group,
            broker_id=folder_state.identity.broker_id,
            opening=folder_state.opening.opening,
            clock=clock,
            run_read=pools.background,
            background_turn=service.wait_background_turn,
            is_accepted=lambda: registration.is_current,
        )
        keeper = SetKeeper(
            store,
            files,
            broker_group=folder_state.identity.broker_group,
            broker_id=folder_state.identity.broker_id,
            opening=folder_state.opening.opening,
            change=partial(meta.call, CHANGE_COPY_SET, group=folder_state.identity.broker_group),
            offer=partial(meta.call, OFFER_PLACE, group=folder_state.identity.broker_group),
            known=registration.answered,
            is_registered=lambda: not registration.problem,
            run_blocking=pools.background,
            clock=clock,
            rng=rng,
            lag_ms=settings.copy_lag_ms,
            site=_site_of(settings),
        )
        following.on_report, following.may_be_ahead = keeper.note_report, keeper.may_be_ahead
        following.knows_durable_end = keeper.knows_durable_end
        keeper.on_copied = registration.note_copied
        service.register_handler(Follow, following.follow)

        def note_replaced(reason: str) -> None:
            registration.note_replaced(reason)
            service.close()

        handing_over = HandingOver(
            store.commit,
            following,
            keeper,
            broker_group=folder_state.identity.broker_group,
            clock=clock,
            folder_ownership=registration,
            on_replaced=note_replaced,
        )
        peers = Peers(service, folder_state.identity.broker_group, settings.meta, network)
        for close in (peers.close, scheduler.close):
            stack.push_async_callback(close)
        control = BrokerControl(
            store,
            broker_group=folder_state.identity.broker_group,
            broker_id=folder_state.identity.broker_id,
            opening=folder_state.opening.opening,
            folder_ownership=registration,
            clock=clock,
            registration=lambda: registration.problem,
            refusal=lambda: registration.refusal,
            retention=lambda: retention.problem,
            removed_from_ms=retention.removed_from_ms,
            scheduled=scheduler.view,
            copies=lambda: following.view(
                keeper.commitment.members or (), keeper.shared_machines()
            ),
            site=keeper.site,
            waits_for_copies=lambda: keeper.problem,
            limited=no_quotas if broker_guard is None else broker_guard.guard.limited,
            metaservers=settings.meta,
        )
        posting = MessagePosting(peers, clock=clock, rng=rng)
        scheduling = _create_scheduling(
            folder_state,
            service,
            peers,
            registration,
            clock=clock,
            random_bits=naming_rng.getrandbits,
        )
        parking = Parking(store, service, clock=clock, folder_ownership=registration)
        metrics = _create_metrics(store, files, service, clock, broker_guard)
        metrics.add(partial(collect_copies, following))
        metrics.add(partial(collect_copy_set, keeper))
        metrics.add(partial(collect_scheduled, scheduler))
        routes = _collect_routes(
            control, posting, peers, scheduling, parking, metrics, metaservers=settings.meta
        )
        routes.append(handing_over.route())
        guard = None if broker_guard is None else broker_guard.guard
        address = await stack.enter_async_context(listen(routes, service, metrics, guard))
        stack.callback(service.close)
        stack.callback(following.close)
        stack.push_async_callback(keeper.close)
        loops = [
            registration.run(),
            retention.run(),
            scheduler.run(posting, registration),
            expire_series_loop(store, clock),
            keeper.run(),
        ]
        _start_loops(stack, loops if broker_guard is None else [*loops, broker_guard.audit.run()])
        yield RunningBroker(
            address,
            folder_state.identity,
            store,
            retention.apply_settings,
            registration.is_behind,
            handing_over,
        )


def _site_of(settings: BrokerSettings) -> Site:
    """Return where this process runs."""
    return Site(settings.machine or machine_name(), settings.zone)


def _start_loops(
    stack: contextlib.AsyncExitStack, loops: Sequence[Coroutine[Any, Any, None]]
) -> None:
    """Run the loops as tasks until the stack is closed."""
    for loop in loops:
        stack.push_async_callback(_cancel, asyncio.create_task(loop))


def _open(
    files: Files,
    settings: BrokerSettings,
    clock: Clock,
    rng: random.Random,
    naming_rng: random.Random,
    pools: Pools,
    *,
    on_claimed: Callable[[], None],
    begun: Recovery | None,
) -> _Folder:
    """Lock the data folder, recover its store, and begin a new opening. Blocks."""
    files.lock()
    identity = claim_folder(files, broker_group=settings.group, rng=rng)
    on_claimed()
    agenda = ScheduledAgenda(files, clock) if begun is None else begun.agenda
    assert isinstance(agenda, ScheduledAgenda)
    store = Store.open(
        files,
        settings,
        clock=clock,
        run_commit=pools.commit,
        run_read=pools.read,
        run_background=pools.background,
        quick=pools.quick,
        agenda=agenda,
        begun=begun,
    )
    scheduler = Scheduler.open(
        files,
        agenda,
        store,
        clock=clock,
        rng=naming_rng,
        broker_group=settings.group,
        count_max=settings.scheduled_count_max,
        bytes_max=settings.scheduled_bytes_max,
    )
    opening = begin_opening(files, rng=naming_rng)
    return _Folder(identity, store, opening, scheduler)


def _open_guard(
    opened: _Folder,
    files: Files,
    settings: BrokerSettings,
    meta: MetaClient,
    *,
    clock: Clock,
    pools: Pools,
    address: Callable[[], str],
) -> BrokerGuard | None:
    """Return the broker's access control, or None if it is switched off."""
    if not settings.is_guarded:
        return None
    from .access.audit_sender import AuditSender
    from .access.broker_guard import BrokerGuard  # only a guarded broker needs this library
    from .access.judge import CapabilityJudge

    judge = CapabilityJudge(
        clock,
        partial(meta.call, ACCESS_NEWS),
        own_token=TokenFile(settings.token_file) if settings.token_file else None,
        operators=read_operators(files),
        save_operators=lambda operators: asyncio.ensure_future(
            pools.background(save_operators, files, operators)
        ),
    )
    return BrokerGuard(
        judge,
        opened.store,
        opened.scheduler,
        clock=clock,
        address=address,
        audit=AuditSender(opened.identity.broker_group, partial(_store_audit, meta)),
    )


async def _store_audit(meta: MetaClient, events: list[AuditEvent]) -> None:
    await meta.call(NOTE_AUDIT, NoteAudit(events=events))


def _create_scheduling(
    opened: _Folder,
    service: BrokerService,
    peers: Peers,
    registration: Registration,
    *,
    clock: Clock,
    random_bits: DrawBits,
) -> Scheduling:
    """Create the handler of scheduled messages, and register it at `service` for its frames."""
    scheduling = Scheduling(
        opened.scheduler,
        peers,
        broker_group=opened.identity.broker_group,
        clock=clock,
        random_bits=random_bits,
        folder_ownership=registration,
        check_writable=lambda: opened.store.commit.check_room(0),
    )
    service.register_handler(Schedule, scheduling.schedule)
    service.register_handler(CancelScheduled, scheduling.cancel)
    return scheduling


def _collect_routes(
    control: BrokerControl,
    posting: MessagePosting,
    peers: Peers,
    scheduling: Scheduling,
    parking: Parking,
    metrics: ServerMetrics,
    *,
    metaservers: Sequence[str],
) -> list[ControlRoute]:
    """Return a route for each endpoint of `endpoints.BROKER`, for the metrics, and for the API
    document and the front page.
    """
    return [
        *control.routes(),
        posting.route(),
        MessageReading(peers).route(),
        *scheduling.routes(),
        *parking.routes(),
        metrics_route(metrics),
        document_route(BROKER, "broker"),
        front_route(
            BROKER,
            "broker",
            f"Programs connect to a metaserver, here {', '.join(metaservers)}, which names the "
            "brokers to them.",
        ),
    ]


def _create_metrics(
    store: Store,
    files: Files,
    service: BrokerService,
    clock: Clock,
    broker_guard: BrokerGuard | None,
) -> ServerMetrics:
    metrics = ServerMetrics("broker", clock.boot_ns)
    broker_metrics = BrokerMetrics(store, files, clock=clock, waiting=lambda: service.waiting)
    metrics.add(broker_metrics.collect)
    if broker_guard is not None:
        metrics.add(access_metrics(broker_guard.guard, broker_guard.audit.buffer))
    return metrics


def _build_report(
    opened: _Folder,
    settings: BrokerSettings,
    address: str,
    *,
    untold: tuple[int, ...],
    registration: Registration,
    keeper: SetKeeper,
) -> BrokerHeartbeat:
    """Build the broker's report. Earlier openings are omitted if the last report was accepted."""
    identity, store, opening, _ = opened
    reason = store.commit.refusal_reason or keeper.problem
    return BrokerHeartbeat(
        broker_group=identity.broker_group,
        broker_id=identity.broker_id,
        address=address,
        writable=not reason,
        problem=reason[:SHORT_TEXT_CHARS_MAX],
        opening=opening.opening,
        opened_after=opening.earlier if registration.problem else (),
        log_end=store.log.end,
        hosted=len(store.state.partitions),
        highest_id=max(store.state.partitions.ids(), default=0),
        untold=untold,
        version=VERSION,
        cluster=settings.cluster,
        steps_back=settings.failover,
        term=keeper.term,
        history=registration.history,
    )


def _own_network(
    stack: contextlib.AsyncExitStack, settings: BrokerSettings, served_network: ServedNetwork
) -> Network:
    """Return the network for the broker's own calls, which authenticate with its token. `stack`
    closes it.
    """
    token = TokenFile(settings.token_file) if settings.token_file else None
    network = served_network.outgoing(token)
    stack.push_async_callback(network.close)
    return network


def _create_pools(
    stack: contextlib.AsyncExitStack, settings: BrokerSettings, clock: Clock
) -> Pools:
    commit = WorkerThread("commit")
    stack.callback(commit.close)
    quick: KernelQuickSync | None = None
    try:
        quick = KernelQuickSync(KernelSyncs(), commit, clock)
        stack.callback(quick.close)
    except OSError as error:
        log.info(
            "commits are synced by a thread, not by the kernel's asynchronous I/O: %s",
            error.strerror,
        )
    return Pools(
        commit=commit,
        read=_thread_pool(stack, settings.reader_threads, "read"),
        background=_thread_pool(stack, 1, "background"),
        quick=quick,
    )


def _thread_pool(
    stack: contextlib.AsyncExitStack, threads: int, name: str
) -> Callable[..., Awaitable[Any]]:
    """Return a function that runs other functions in a new pool of `threads` threads. The pool is
    shut down by the stack.
    """
    pool = ThreadPoolExecutor(threads, name)
    stack.callback(pool.shutdown)

    def run(function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(pool, function, *args)

    return run


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def tune_interpreter() -> None:
    """Tune the process for serving, and exclude all existing objects from garbage collection."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()


REPLACED_POLL_S = 0.2
"""How often a broker that was refused asks whether another one serves, in seconds."""


async def run_follower(
    settings: BrokerSettings,
    stop: asyncio.Event,
    *,
    network: Network | None = None,
    on_running: Callable[[Callable[[BrokerSettings], None]], None] = lambda _adopt: None,
) -> PromotedFolder | None:
    """
    Keep the data folder a copy of that of the group's broker until `stop` is set, or the copy has
    the broker's place.

    A caller that passes a `network` must close it.

    Args:
        on_running: called with what applies those settings that may change while it follows: the
            certificates.

    Returns:
        The folder if a broker may be run on it now; None if it was stopped.

    Raises:
        DataFolderError, FolderRefusedError, StorageError: the folder cannot follow the broker.
    """
    async with contextlib.AsyncExitStack() as stack:
        files = make_files(str(settings.data))
        stack.callback(files.close)
        write = WorkerThread("copy")
        stack.callback(write.close)
        served_network = ServedNetwork(settings)
        network = network or _own_network(stack, settings, served_network)
        on_running(served_network.adopt)
        fold = WorkerThread("fold")
        stack.callback(fold.close)
        await write(files.lock)
        restrict_permissions(str(settings.data))
        sys.setswitchinterval(SWITCH_S)
        folding = Folding(
            files,
            settings.index,
            make_agenda=partial(ScheduledAgenda, files, SystemClock()),
            clock=SystemClock(),
            run_blocking=fold,
        )
        follower = Follower(
            files,
            settings.group,
            meta=MetaClient(network, settings.meta),
            network=network,
            run_blocking=write,
            clock=SystemClock(),
            rng=random.SystemRandom(),
            takes_over=settings.failover,
            folding=folding if settings.failover or settings.serve_reads else None,
            site=_site_of(settings),
        )
        metrics = ServerMetrics("broker", SystemClock().boot_ns)
        metrics.add(served_network.collect)
        metrics.add(partial(collect_cuts, follower))
        routes = follower_routes(follower, metrics)
        async with contextlib.AsyncExitStack() as serving:
            if settings.serve_reads:
                reads = CopyReads(
                    files,
                    lambda: follower.durable,
                    lambda: folding.queues,
                    broker_group=settings.group,
                    run_read=_thread_pool(serving, settings.reader_threads, "read"),
                )
                metrics.add(partial(collect_copy_reads, reads))
                server = _run_server(settings, served_network, routes, reads, metrics, None)
                follower.reads_at = await serving.enter_async_context(server)
            else:
                probes = answering_probes(settings, served_network, routes)
                await serving.enter_async_context(probes)
            async with Race() as race:
                following = race.start(follower.run())
                race.start(stop.wait())
                await race.first()
                has_place = following.done()
                if has_place:
                    following.result()
        if not has_place:
            await fold(folding.close)
            return None
        await write(promote_candidate, files, follower.candidate)
        return PromotedFolder(files, await folding.finish())


async def run_broker(
    settings: BrokerSettings,
    stop: asyncio.Event,
    *,
    ready: Callable[[str], None],
    on_running: Callable[[RunningBroker], None] = lambda _broker: None,
    promoted: PromotedFolder | None = None,
) -> bool:
    """
    Serve until `stop` is set, or with `failover` until another folder has this one's place. Tunes
    the whole process, which must not do any other work.

    Args:
        ready: called with the address once the broker listens. It may not be registered yet at that
            time.
        on_running: called with the broker before `ready` is called.
        promoted: see `running_broker`.

    Returns:
        True if the folder is a copy now.
    """
    async with running_broker(settings, promoted=promoted) as broker:
        tune_interpreter()
        on_running(broker)
        ready(broker.address)
        async with Race() as race:
            stopping = race.start(stop.wait())
            replaced = (
                race.start(_wait_until_replaced(settings, broker))
                if settings.failover
                else stopping
            )
            await race.first()
            if not stop.is_set():
                replaced.result()  # a fault of the wait must not turn the folder into a copy
            is_replaced = not stop.is_set() or (
                settings.failover and await _hand_over(broker, replaced)
            )
    if is_replaced:
        await asyncio.to_thread(_demote, settings)
    return not stop.is_set()


async def _hand_over(broker: RunningBroker, replaced: asyncio.Task[object]) -> bool:
    """Let a copy take the place of a broker that is about to stop, if one can. Return True if that
    copy serves.
    """
    if not broker.handing_over.is_possible:
        return False
    try:
        await broker.handing_over.run(HandOver())
    except KeylaneError as error:
        log.warning("stops without a hand-over: %s", error.message)
        return False
    await asyncio.wait((replaced,), timeout=HAND_OVER_MS / 1000)
    return replaced.done() and replaced.exception() is None


async def _wait_until_replaced(settings: BrokerSettings, broker: RunningBroker) -> None:
    """Wait until a metaserver has refused this folder as an older one, and another broker of the
    group serves.
    """
    await broker.is_behind.wait()
    async with contextlib.AsyncExitStack() as stack:
        network = _own_network(stack, settings, ServedNetwork(settings))
        meta = MetaClient(network, settings.meta)
        while True:
            with contextlib.suppress(KeylaneError):
                for view in (await meta.health()).details.get("brokers", []):
                    is_own = view["broker_group"] == settings.group
                    if is_own and view["available"] and view["address"] != broker.address:
                        return
            await asyncio.sleep(REPLACED_POLL_S)


def _demote(settings: BrokerSettings) -> None:
    """Make the folder a copy. Blocks."""
    files = make_files(str(settings.data))
    try:
        files.lock()
        demote_folder(files, copy_id=f"{random.SystemRandom().getrandbits(128):032x}")
    finally:
        files.close()
    log.warning(
        "another folder has taken the place of %s in broker group %s: it is a copy now",
        settings.data,
        settings.group,
    )


def follows(settings: BrokerSettings) -> bool:
    """Return True if the folder is to be kept as a copy: with `failover`, that is what it is."""
    if not settings.failover:
        return settings.follow
    files = make_files(str(settings.data))
    try:
        return is_copy(files) or (settings.follow and not is_claimed(files))
    finally:
        files.close()
