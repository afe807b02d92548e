"""Manages the partitions assigned to a consumer: creates and ends shells until they match its
grants.

    granted ─▶ new: create a client   known: renew it   revoked, lapsed, or another token: end it
                                                                                            │
             stop pulling ─▶ finish or cancel handlers ─▶ send acks ─▶ release ─▶ report ◀──╯

Each partition is handed over in a separate task, so that a slow handler of one does not delay the
others.

Invariants
    A partition has at most one client, or one hand-over in progress. A single-use or fenced token
    is never used again, so no message is handled twice under it. A partition's release is reported
    to the metaserver only after its handlers have ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from ...protocol.clock import Clock
from ...protocol.codecs.codec import Codec
from ...protocol.control import Grant, Grants
from ...protocol.ids import MAX_I64
from ...protocol.operations import SubjectHistory
from ...protocol.routing import ConsumeStrategy
from ...rpc.connections import Connections
from ...rpc.operating.client_counts import ConsumerCounts
from ...rpc.race import start_task, wait_for_cancelled
from ..dispatch.loop import LoopDispatch
from ..dispatch.workers import WorkerPool
from ..filter import MessageFilter
from ..prefetch_budget import PrefetchBudget
from ..session.events import SettingsStored
from ..session_shell import SessionShell, SuspectLock
from ..settings import AckMode, ConsumerSettings
from .assignment_log import AssignmentLog
from .broadcast import Broadcast
from .effective_settings import EffectiveSettings
from .hand_overs import Callbacks, HandOvers
from .log_lines import EndCause
from .membership import Membership
from .reachability import BrokerReachability

CHECK_MS_MAX = 1_000
"""The longest interval, in milliseconds, between checks for lapsed leases, long-running handlers
and a blocked event loop.
"""
PROGRAM_END_S = 1.0
"""How many seconds a consumer waits, when its event loop ends, for the program to close it."""
IDLE_CHECKS_PER_TTL = 10
"""The number of checks per ttl while no handler has a message, if that is less often than
CHECK_MS_MAX requires, so that many idle consumers cost little. A measured stall may then be too
short by one interval.
"""
ENDED_TOKENS_MAX = 10_000
"""The number of partitions, beyond the granted ones, whose retired tokens are remembered. It is
limited because a consumer is granted new partitions for as long as it lives.
"""


class Holdings:
    """The partitions that a consumer has, by id: granted, assigned, and being handed over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.granted: dict[int, Grant] = {}
        """The grants in force."""
        self.deadline_ms = 0
        """The end of all leases, on the boot clock."""
        self.is_closing = False
        """True once grants are no longer accepted."""
        self.assigned: dict[int, SessionShell] = {}
        self.releasing: dict[int, tuple[SessionShell, asyncio.Task[None]]] = {}
        """The shells that are being handed over, each with the task that does it."""
        self._retired_tokens: dict[int, int] = {}
        """Each partition's highest token that must not be used again, in the order in which they
        were retired.
        """

    @property
    def left_ms(self) -> int:
        """The milliseconds until the leases end; 0 or less after that."""
        return self.deadline_ms - self._clock.boot_ms()

    def retire_token(self, partition_id: int, token: int) -> None:
        """Remember a token that must not be used again; forget the oldest tokens, whose partitions
        are no longer granted.
        """
        retired = self._retired_tokens
        retired.pop(partition_id, None)
        retired[partition_id] = token
        if len(retired) > ENDED_TOKENS_MAX + len(self.granted):
            del retired[next(iter(retired))]

    def is_retired(self, grant: Grant) -> bool:
        """Return True if the token of a grant must not be used again."""
        return grant.token <= self._retired_tokens.get(int(grant.partition.partition_id), -1)

    def all_of(self, session: str) -> tuple[tuple[int, int], ...]:
        """Return (partition id, token) for each partition that `session` holds, or is handing
        over.
        """
        clients = [*self.assigned.values(), *(client for client, _ in self.releasing.values())]
        return tuple(
            sorted(
                (client.partition_id, client.state.tenure.lease.token)
                for client in clients
                if client.state.tenure.lease.session == session
            )
        )


class Assignments:
    """
    Owns the shells of a consumer from one `open` to the next `close`.

    It is the `GrantHolder` of the membership, and the `ShellOwner` of each shell.

    Args:
        dispatcher: delivers messages to handlers or to the iterating program.
        fail: called with a fatal error, which closes the consumer.
        message_filter: selects the messages that the user wants; None: all.
        alone: runs messages that may kill the process one at a time; None: a new lock.
    """

    def __init__(
        self,
        *,
        settings: ConsumerSettings,
        clock: Clock,
        rng: random.Random,
        connections: Connections,
        membership: Membership | Broadcast,
        dispatcher: WorkerPool | LoopDispatch,
        codec: Codec[Any] | None,
        fail: Callable[[BaseException], None],
        message_filter: MessageFilter | None = None,
        alone: SuspectLock | None = None,
    ) -> None:
        self.alone = alone or SuspectLock()
        # With max_wait_ms, messages that wait for a full batch would otherwise wait for budget that
        # they hold themselves.
        self.budget = PrefetchBudget(MAX_I64) if settings.max_wait_ms else PrefetchBudget()
        self.counts = ConsumerCounts(self, dispatcher.handling)
        self.codec = codec
        self.message_filter = message_filter
        self.by_hand = isinstance(dispatcher, LoopDispatch)
        """True if the program takes and acks messages itself; still valid after `close`."""
        self.fail = fail
        self._membership = membership
        self._dispatcher = dispatcher
        if settings.consume_strategy is ConsumeStrategy.SHARED:
            dispatcher.on_idle = self._wake_pulls
        self._effective = EffectiveSettings(membership.member, settings)
        self._held = Holdings(clock)
        self._hand_overs = HandOvers(
            Callbacks(membership.member.name, settings), membership, dispatcher, settings, rng
        )
        self._log = AssignmentLog(membership, clock, settings)
        self._reachability: BrokerReachability | None = None
        """None if no other consumer could be granted the partitions that this one cannot reach."""
        exclusive = settings.consume_strategy is ConsumeStrategy.EXCLUSIVE
        if exclusive and isinstance(membership, Membership):
            self._reachability = BrokerReachability(
                membership, connections, clock, ttl_ms=settings.ttl_ms
            )
        self._make_client = partial(
            SessionShell,
            subject=membership.member.subject,
            group=membership.member.group,
            connections=connections,
            clock=clock,
            rng=rng,
            owner=self,
            dispatch=dispatcher,
        )
        self._watch_task: asyncio.Task[None] | None = None

    def on_fork(self) -> None:
        """Start no more handlers in this process, which is a forked child: the leases belong to the
        parent.
        """
        for client in (*self.clients, *self.handing_over):
            client.on_fork()

    def start(self) -> None:
        """Start watching for lapsed leases and unreachable brokers."""
        self._watch_task = start_task(self._watch(), name="lease deadline")

    @property
    def load(self) -> tuple[int, int]:
        """See `client_counts.Share`."""
        clients = self.clients
        return len(clients), sum(client.lag_messages for client in clients)

    @property
    def clients(self) -> list[SessionShell]:
        """The clients that are not being handed over, by partition id."""
        return [client for _, client in sorted(self._held.assigned.items())]

    @property
    def handing_over(self) -> list[SessionShell]:
        """The clients that are being handed over, by partition id."""
        return [client for _, (client, _) in sorted(self._held.releasing.items())]

    @property
    def waiting_for(self) -> str:
        """A text for users: who has suspended the consumer, and which partitions it handles one
        message at a time; "" if neither applies.
        """
        suspended = "resume(): its own code has suspended it" if self._membership.suspended else ""
        careful = [
            str(client.partition_id) for client in self.clients if client.state.suspects is not None
        ]
        suspects = (
            f"suspects of partition {', '.join(careful)}: two earlier owners ended without handing "
            "it over, and the messages that both had are handled one at a time"
            if careful
            else ""
        )
        return "; ".join(filter(None, (suspended, self._effective.waiting_for, suspects)))

    @property
    def allows_redrives(self) -> bool:
        """True if parked messages can be redriven here: not with ack="before", and not if the
        program takes Arrow batches.
        """
        before = self._effective.settings.ack is AckMode.BEFORE
        return not before and not self._dispatcher.by_column

    # ── GrantHolder: called by the membership ─────────────────────────────────────────────────────
    def apply_grants(self, grants: Grants, deadline_ms: int) -> None:
        """Replace the grants; all leases end at `deadline_ms` on the boot clock."""
        self._held.deadline_ms = deadline_ms
        if self._effective.update(grants):
            for client in self.clients:
                client.feed(SettingsStored(self._effective.settings))
        for client in self.handing_over:
            if client.state.tenure.lease.session == self._membership.session:
                client.renew(deadline_ms, None)
        if not self._held.is_closing:
            self._held.granted = {
                int(grant.partition.partition_id): grant for grant in grants.grants
            }
            self._apply_grants()

    def on_session_lost(self) -> None:
        """Hand over all partitions: the grants ended with the session."""
        self.hand_over_all()

    def drained(self) -> tuple[int, ...]:
        """Return the ids of sealed partitions that the group has acked to the end."""
        return tuple(client.partition_id for client in self.clients if client.state.is_drained)

    def parked(self) -> tuple[int, ...]:
        """Return the ids of the drained partitions that have parked messages of the group."""
        return tuple(
            client.partition_id
            for client in self.clients
            if client.state.is_drained and client.state.parking.version
        )

    def holding(self, session: str) -> tuple[tuple[int, int], ...]:
        """Return (partition id, token) for each partition that `session` holds, or is handing
        over.
        """
        return self._held.all_of(session)

    def unreached(self) -> tuple[str, ...]:
        """Return the broker groups that this consumer cannot reach although they send heartbeats to
        the metaserver.
        """
        return () if self._reachability is None else self._reachability.unreached

    # ── ShellOwner: called by shells ─────────────────────────────────────────────────────────
    def _wake_pulls(self) -> None:
        """Wake pulls that are waiting for a free worker."""
        for client in self.clients:
            client.wake()

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        return await self._membership.history()

    def nudge(self) -> None:
        """Send the next heartbeat now, so that it reports drained partitions; without a group, look
        where the brokers of partitions are.
        """
        self._membership.nudge()

    def start_hand_over(self, client: SessionShell) -> None:
        """Start handing over the client's partition in a separate task."""
        partition_id, held = client.partition_id, self._held
        if held.assigned.get(partition_id) is not client:
            return
        del held.assigned[partition_id]
        cause = self._cause_of_end(client)
        self._log.note_end(client, cause)
        client.stop()
        if client.token_is_single_use or client.state.tenure.fence is not None:
            held.retire_token(partition_id, client.state.tenure.lease.token)
        hand_over = self._run_hand_over(client, is_lost=cause.is_loss)
        held.releasing[partition_id] = (
            client,
            start_task(hand_over, name=f"hand over {partition_id}"),
        )

    def _cause_of_end(self, client: SessionShell) -> EndCause:
        """Return why a partition is handed over."""
        if client.state.tenure.fence is not None:
            return EndCause.FENCED
        if client.lapsed:
            return EndCause.LAPSED
        if (
            client.state.tenure.lease.session != self._membership.session
            and not self._held.is_closing
        ):
            return EndCause.SESSION_ENDED
        if client.state.is_drained:
            return EndCause.DRAINED
        return EndCause.SUSPENDED if self._membership.suspended else EndCause.REBALANCE

    # ── grants compared with clients ──────────────────────────────────────────────────────────────
    def _apply_grants(self) -> None:
        """Create, renew and end clients, so that each grant has exactly one."""
        held = self._held
        for client in list(held.assigned.values()):
            grant = held.granted.get(client.partition_id)
            if grant is None or grant.token != client.state.tenure.lease.token or client.lapsed:
                self.start_hand_over(client)
            else:
                client.renew(held.deadline_ms, grant.partition.address)
                client.calls.reads.update_grant(grant)
        for partition_id, grant in held.granted.items():
            if partition_id in held.assigned or partition_id in held.releasing:
                continue
            if held.is_retired(grant):
                self._hand_overs.report_again(grant)
            elif grant.partition.address is not None and held.left_ms > 0:
                client = held.assigned[partition_id] = self._new_client(grant)
                self._log.note_start(grant)
                self._hand_overs.callbacks.notify_assigned(client)
        self._log_partitions()

    def _new_client(self, grant: Grant) -> SessionShell:
        options: dict[str, Any] = {}
        if isinstance(self._membership, Broadcast):
            partition_id = int(grant.partition.partition_id)
            options["acked"], options["is_superfluous"] = self._membership.find_acks(partition_id)
        return self._make_client(
            session=self._membership.session,
            cluster_id=self._membership.cluster_id,
            grant=grant,
            deadline_ms=self._held.deadline_ms,
            settings=self._effective.settings,
            **options,
        )

    def replace_sessions(self) -> None:
        """Let sessions that hand out columns take the place of the present ones under the same
        tokens. The program has taken nothing of these.
        """
        held = self._held
        for partition_id, shell in list(held.assigned.items()):
            shell.abandon()
            client = held.assigned[partition_id] = self._new_client(held.granted[partition_id])
            shell.gate.pass_on(client)

    # ── hand-over ─────────────────────────────────────────────────────────────────────────────────
    async def _run_hand_over(self, client: SessionShell, *, is_lost: bool) -> None:
        held = self._held
        self.counts.lost_leases += is_lost
        try:
            await self._hand_overs.hand_over(client, is_lost=is_lost)
        except BaseException as error:
            # A bug, or the event loop is closing. Tasks that stay would send acks for a closed
            # consumer.
            client.abandon()
            if isinstance(error, Exception):
                self.fail(error)
            raise
        finally:
            del held.releasing[client.partition_id]
        if client.partition_id in held.granted and not held.is_closing:
            self._apply_grants()  # granted again during the hand-over

    def hand_over_all(self) -> list[asyncio.Task[None]]:
        """Start handing over every partition, and return the tasks of all hand-overs in
        progress.
        """
        self._held.granted = {}
        for client in self.clients:
            self.start_hand_over(client)
        return [task for _, task in self._held.releasing.values()]

    def stop(self) -> None:
        """Accept no more grants, and start no more handlers; `close` then hands over every
        partition.
        """
        self._held.is_closing = True
        for client in self.clients:
            client.stop()

    async def close(self) -> None:
        """Accept no more grants, hand over every partition, and wait for the hand-overs."""
        assert self._watch_task is not None
        self._watch_task.cancel()
        self._log.close()
        if self._reachability is not None:
            self._reachability.close()
        self._held.is_closing = True
        hand_overs = self.hand_over_all()
        if hand_overs:
            self._hand_overs.announce_leave()
        await asyncio.gather(
            self._watch_task, *hand_overs, *self._hand_overs.reports, return_exceptions=True
        )
        self._log.log_losses(last=True)

    def drop_references(self) -> None:
        """
        Drop the references to the consumer, after `close`.

        Messages refer to this object through their shells, and the garbage collector does not
        track messages. A message that a handler's object stores would form a cycle that keeps the
        handler, and so the consumer, alive forever.
        """
        self.fail = _ignore
        self._dispatcher.on_idle = None
        del self._dispatcher, self._membership, self._hand_overs, self._make_client, self._log
        self._reachability = None

    # ── leases that end, and why ──────────────────────────────────────────────────────────────────
    async def _watch(self) -> None:
        """Watch the leases; if the event loop ends first, abandon all partitions, so that none
        begins a call that nobody would wait for.
        """
        try:
            await self._watch_deadline()
        except asyncio.CancelledError:
            if not self._held.is_closing:
                await wait_for_cancelled(PROGRAM_END_S)  # one of them may close the consumer
            if not self._held.is_closing:
                for client in (*self.clients, *self.handing_over):
                    client.abandon()
                    await client.calls.wait_closed()
            raise

    async def _watch_deadline(self) -> None:
        """End clients whose lease has lapsed, which cancels their handlers; log stalls and lost
        partitions.
        """
        # Check soon: a handler that blocks usually does so with its first messages.
        settings, held = self._effective.settings, self._held
        check_ms = settings.margin_ms
        while True:
            remaining_ms = held.left_ms
            if remaining_ms <= 0:
                for client in self.clients:
                    if client.lapsed:
                        self.start_hand_over(client)
                remaining_ms = settings.margin_ms
            await self._log.sleep(remaining_ms, check_ms)
            self._log.log_losses()
            self._log_partitions()
            self._log.log_lag([client.position for client in held.assigned.values()])
            self._dispatcher.check_long_running()
            if self._reachability is not None:
                self._reachability.check(self.clients)
            check_ms = CHECK_MS_MAX
            if not held.releasing and not any(client.state.intake.held for client in self.clients):
                check_ms = max(CHECK_MS_MAX, settings.ttl_ms // IDLE_CHECKS_PER_TTL)

    def _log_partitions(self) -> None:
        if not self._held.is_closing:
            assigned = self._held.assigned
            self._log.log_partitions(assigned, "" if assigned else self.waiting_for)


def _ignore(error: BaseException) -> None:
    """Replaces `fail` after the consumer is closed."""
