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
import logging
import random
from collections.abc import Callable
from typing import Any

from ..protocol.clock import Clock
from ..protocol.codecs.codec import Codec
from ..protocol.control import Grant, Grants
from ..protocol.errors import KeylaneError, UnreachableError
from ..protocol.ids import MAX_I64
from ..protocol.operations import SubjectHistory
from ..protocol.routing import ConsumeStrategy
from ..rpc.connections import Connections
from ..rpc.race import start_task
from .assignment_log import (
    WAITS,
    AssignmentLog,
    source_text,
    unanswered_text,
    waiting_text,
)
from .broadcast import Broadcast
from .broker_reachability import BrokerReachability
from .dispatch.loop import LoopDispatch
from .dispatch.workers import WorkerPool
from .effective_settings import EffectiveSettings
from .filter import MessageFilter
from .log_names import consumer_name
from .losses import FENCED, SESSION_ENDED, Losses, Stalls, lapse_reason
from .membership import Membership
from .prefetch_budget import PrefetchBudget
from .rebalance import Rebalance
from .session.events import SettingsStored
from .session_shell import PAUSED, SessionShell, SuspectLock
from .settings import AckMode, ConsumerSettings

log = logging.getLogger("keylane.consumer")

CHECK_MS_MAX = 1_000
"""The longest interval, in milliseconds, between checks for lapsed leases, long-running handlers
and a blocked event loop.
"""
IDLE_CHECKS_PER_TTL = 10
"""The number of checks per ttl while no handler has a message, if that is less often than
CHECK_MS_MAX requires, so that many idle consumers cost little. A measured stall may then be too
short by one interval.
"""
ENDED_TOKENS_MAX = 10_000
"""The number of partitions, beyond the granted ones, whose retired tokens are remembered. It is
limited because a consumer is granted new partitions for as long as it lives.
"""


class Assignments:
    """
    Owns the shells of a consumer from one `open` to the next `close`.

    It is the `GrantHolder` of the membership, and the `ShellOwner` of each shell.

    Args:
        dispatcher: delivers messages to handlers or to the iterating program.
        fail: called with a fatal error, which closes the consumer.
        rebalance: calls the user's rebalance callbacks.
        message_filter: selects the messages that the user wants; None: all.
        alone: runs messages that may kill the process one at a time; None: a new lock.
    """

    def __init__(
        self,
        *,
        subject: str,
        group: str,
        settings: ConsumerSettings,
        clock: Clock,
        rng: random.Random,
        connections: Connections,
        membership: Membership | Broadcast,
        dispatcher: WorkerPool | LoopDispatch,
        codec: Codec[Any] | None,
        fail: Callable[[BaseException], None],
        rebalance: Rebalance | None = None,
        message_filter: MessageFilter | None = None,
        alone: SuspectLock | None = None,
    ) -> None:
        self.alone = alone or SuspectLock()
        # With max_wait_ms, messages that wait for a full batch would otherwise wait for budget that
        # they hold themselves.
        self.budget = PrefetchBudget(MAX_I64) if settings.max_wait_ms else PrefetchBudget()
        self.codec = codec
        self.message_filter = message_filter
        self._rebalance = rebalance or Rebalance(limit_ms=settings.handover_ms)
        self._subject = subject
        self._group = group
        self._name = consumer_name(subject, group)
        self._settings = settings
        """The settings in force; values stored for the group override those in code."""
        self._effective = EffectiveSettings(
            subject=subject, group=group, client=membership.client, settings=settings
        )
        self._clock = clock
        self._rng = rng
        self._connections = connections
        self._membership = membership
        self.by_hand = isinstance(dispatcher, LoopDispatch)
        """True if the program takes and acks messages itself; still valid after `close`."""
        self._dispatcher = dispatcher
        if settings.consume_strategy is ConsumeStrategy.SHARED:
            dispatcher.on_idle = self._wake_pulls
        self._fail = fail
        self._clients: dict[int, SessionShell] = {}
        self._handing_over: dict[int, SessionShell] = {}
        self._hand_overs: dict[int, asyncio.Task[None]] = {}
        """The hand-over task of each client in `_handing_over`."""
        self._retired_tokens: dict[int, int] = {}
        """Each partition's highest token that must not be used again, in the order in which they
        were retired.
        """
        self._reports: set[asyncio.Task[None]] = set()
        self._grants: tuple[Grant, ...] = ()
        self._deadline_ms = 0
        self._closing = False
        self._leave_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._waiting_task: asyncio.Task[None] | None = None
        """Asks which members own the partitions, for a log line."""
        self._stalls = Stalls()
        self._losses = Losses()
        self._lines = AssignmentLog()
        self._reachability: BrokerReachability | None = None
        """None if no other consumer could be granted the partitions that this one cannot reach."""

    def on_fork(self) -> None:
        """Start no more handlers in this process, which is a forked child: the leases belong to the
        parent.
        """
        for client in (*self._clients.values(), *self._handing_over.values()):
            client.on_fork()

    def start(self) -> None:
        """Start watching for lapsed leases and unreachable brokers."""
        exclusive = self._settings.consume_strategy is ConsumeStrategy.EXCLUSIVE
        if exclusive and isinstance(self._membership, Membership):
            self._reachability = BrokerReachability(
                self._name,
                self._group,
                membership=self._membership,
                connections=self._connections,
                clock=self._clock,
                ttl_ms=self._settings.ttl_ms,
            )
        self._watch_task = start_task(self._watch_deadline(), name="lease deadline")

    @property
    def clients(self) -> list[SessionShell]:
        """The clients that are not being handed over, by partition id."""
        return [self._clients[key] for key in sorted(self._clients)]

    @property
    def handing_over(self) -> list[SessionShell]:
        """The clients that are being handed over, by partition id."""
        return [self._handing_over[key] for key in sorted(self._handing_over)]

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
        if self._settings.ack is AckMode.BEFORE:
            return False
        return not self._dispatcher.by_column

    # ── GrantHolder: called by the membership ─────────────────────────────────────────────────────
    def apply_grants(self, grants: Grants, deadline_ms: int) -> None:
        """Replace the grants; all leases end at `deadline_ms` on the boot clock."""
        self._deadline_ms = deadline_ms
        if self._effective.update(grants):
            self._settings = self._effective.settings
            for client in self.clients:
                client.feed(SettingsStored(self._settings))
        for client in self.handing_over:
            if client.state.tenure.lease.session == self._membership.session:
                client.renew(deadline_ms, None)
        self._apply(grants.grants)

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
        clients = sorted((self._clients | self._handing_over).items())
        leases = [(key, client.state.tenure.lease) for key, client in clients]
        return tuple((key, lease.token) for key, lease in leases if lease.session == session)

    def unreached(self) -> tuple[str, ...]:
        """Return the broker groups that this consumer cannot reach although they send heartbeats to
        the metaserver.
        """
        return () if self._reachability is None else self._reachability.unreached

    def fail(self, error: BaseException) -> None:
        """Close the consumer because of a fatal error."""
        self._fail(error)

    # ── ShellOwner: called by shells ─────────────────────────────────────────────────────────
    def _wake_pulls(self) -> None:
        """Wake pulls that are waiting for a free worker."""
        for client in list(self._clients.values()):
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
        partition_id = client.partition_id
        if self._clients.get(partition_id) is not client:
            return
        del self._clients[partition_id]
        self._lines.note_end(partition_id, self._cause_of_end(client))
        client.stop()
        if client.token_is_single_use or client.state.tenure.fence is not None:
            self._retire_token(partition_id, client.state.tenure.lease.token)
        self._handing_over[partition_id] = client
        self._hand_overs[partition_id] = start_task(
            self._run_hand_over(client), name=f"hand over {partition_id}"
        )

    def _cause_of_end(self, client: SessionShell) -> str:
        """Return in a few words why a partition is handed over."""
        if client.state.tenure.fence is not None:
            return "fenced"
        if client.lapsed:
            return "lease ran out"
        if client.state.tenure.lease.session != self._membership.session:
            return "session ended"
        if client.state.is_drained:
            return "handled to its end"
        return "suspended" if self._membership.suspended else "rebalance"

    def _retire_token(self, partition_id: int, token: int) -> None:
        """Remember a token that must not be used again; forget the oldest tokens, whose partitions
        are no longer granted.
        """
        retired = self._retired_tokens
        retired.pop(partition_id, None)
        retired[partition_id] = token
        if len(retired) > ENDED_TOKENS_MAX + len(self._grants):
            del retired[next(iter(retired))]

    # ── grants compared with clients ──────────────────────────────────────────────────────────────
    def _apply(self, grants: tuple[Grant, ...]) -> None:
        """Create, renew and end clients, so that each grant has exactly one."""
        if self._closing:
            return
        self._grants = grants
        granted = {int(grant.partition.partition_id): grant for grant in grants}
        for partition_id, client in list(self._clients.items()):
            grant = granted.get(partition_id)
            if grant is None or grant.token != client.state.tenure.lease.token or client.lapsed:
                self.start_hand_over(client)
            else:
                client.renew(self._deadline_ms, grant.partition.address)
                client.calls.reads.update_grant(grant)
        for partition_id, grant in granted.items():
            if partition_id in self._clients or partition_id in self._hand_overs:
                continue
            if grant.token <= self._retired_tokens.get(partition_id, -1):
                self._report_release_again(grant)
            elif grant.partition.address is not None and self._clock.boot_ms() < self._deadline_ms:
                client = self._clients[partition_id] = self._new_client(grant)
                self._lines.note_start(partition_id, source_text(grant.previous))
                self._rebalance.notify_assigned(client)
        self._log_partitions()

    def _new_client(self, grant: Grant) -> SessionShell:
        options: dict[str, Any] = {}
        if isinstance(self._membership, Broadcast):
            partition_id = int(grant.partition.partition_id)
            options["acked"], options["is_superfluous"] = self._membership.find_acks(partition_id)
        return SessionShell(
            subject=self._subject,
            group=self._group,
            session=self._membership.session,
            cluster_id=self._membership.cluster_id,
            grant=grant,
            connections=self._connections,
            deadline_ms=self._deadline_ms,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            owner=self,
            dispatch=self._dispatcher,
            **options,
        )

    def replace_sessions(self) -> None:
        """Let sessions that hand out columns take the place of the present ones under the same
        tokens. The program has taken nothing of these.
        """
        grants = {int(grant.partition.partition_id): grant for grant in self._grants}
        for partition_id, shell in list(self._clients.items()):
            shell.abandon()
            client = self._clients[partition_id] = self._new_client(grants[partition_id])
            if shell.gate.is_paused:
                client.gate.add(PAUSED)

    # ── hand-over ─────────────────────────────────────────────────────────────────────────────────
    async def _run_hand_over(self, client: SessionShell) -> None:
        try:
            await self._hand_over(client)
        except BaseException as error:
            # A bug, or the event loop is closing. Tasks that stay would send acks for a closed
            # consumer.
            client.abandon()
            if isinstance(error, Exception):
                self._fail(error)
            raise
        finally:
            del self._hand_overs[client.partition_id]
            del self._handing_over[client.partition_id]
        if client.partition_id in {int(grant.partition.partition_id) for grant in self._grants}:
            self._apply(self._grants)  # granted again during the hand-over

    async def _hand_over(self, client: SessionShell) -> None:
        lost = self._record_loss(client)
        iterated = self.by_hand  # the user may still ack messages in hand
        if iterated:
            await self._rebalance.notify_ended(client.partition_id, lost=lost)
        await self._dispatcher.quiesce(client)
        if not iterated:
            await self._rebalance.notify_ended(client.partition_id, lost=lost)
        await client.hand_over(flush_ms=self._settings.call_timeout_ms)
        if self._leave_task is not None:
            await asyncio.wait([self._leave_task])
        tenure = client.state.tenure
        if tenure.fence is not None:
            # Usually a newer owner has the partition; otherwise it is granted again above the
            # fence. The pause keeps that from happening often.
            await asyncio.sleep(self._settings.backoff.wait_ms(1, self._rng) / 1000)
        # Other sessions may hold a token that is neither single-use nor fenced.
        if client.token_is_single_use or tenure.fence is not None:
            session, token = tenure.lease.session, tenure.lease.token
            await self._membership.report_release(
                session, client.partition_id, token, fence=tenure.fence or 0
            )

    def _report_release_again(self, grant: Grant) -> None:
        """Report a release again: the metaserver still grants the token, so it cannot have received
        the report.
        """
        partition_id = int(grant.partition.partition_id)
        report = self._membership.report_release(
            self._membership.session, partition_id, grant.token
        )
        task = start_task(report, name=f"release {partition_id}")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def hand_over_all(self) -> list[asyncio.Task[None]]:
        """Start handing over every partition, and return the tasks of all hand-overs in
        progress.
        """
        self._grants = ()
        for client in self.clients:
            self.start_hand_over(client)
        return list(self._hand_overs.values())

    def stop(self) -> None:
        """Accept no more grants, and start no more handlers; `close` then hands over every
        partition.
        """
        self._closing = True
        for client in self.clients:
            client.stop()

    async def close(self) -> None:
        """Accept no more grants, hand over every partition, and wait for the hand-overs."""
        assert self._watch_task is not None
        self._watch_task.cancel()
        if self._waiting_task is not None:
            self._waiting_task.cancel()
        if self._reachability is not None:
            self._reachability.close()
        self._closing = True
        hand_overs = self.hand_over_all()
        if hand_overs:
            self._leave_task = start_task(self._membership.announce_leave(), name="announce leave")
        await asyncio.gather(self._watch_task, *hand_overs, *self._reports, return_exceptions=True)
        self._log_losses(last=True)

    def drop_references(self) -> None:
        """
        Drop the references to the consumer, after `close`.

        Messages refer to this object through their shells, and the garbage collector does not
        track messages. A message that a handler's object stores would form a cycle that keeps the
        handler, and so the consumer, alive forever.
        """
        self._fail = _ignore
        self._dispatcher.on_idle = None
        del self._dispatcher, self._membership, self._rebalance
        self._reachability = None

    # ── leases that end, and why ──────────────────────────────────────────────────────────────────
    async def _watch_deadline(self) -> None:
        """End clients whose lease has lapsed, which cancels their handlers; log stalls and lost
        partitions.
        """
        # Check soon: a handler that blocks usually does so with its first messages.
        check_ms = self._settings.margin_ms
        while True:
            remaining_ms = self._deadline_ms - self._clock.boot_ms()
            if remaining_ms <= 0:
                for client in self.clients:
                    if client.lapsed:
                        self.start_hand_over(client)
                remaining_ms = self._settings.margin_ms
            # Align the checks of all consumers on the machine, so that one wake-up of the
            # processor serves many.
            sleep_ms = min(remaining_ms, check_ms - self._clock.boot_ms() % check_ms)
            self._stalls.record_sleep(self._clock.boot_ms(), sleep_ms)
            await asyncio.sleep(sleep_ms / 1000)
            self._log_stall()
            self._log_losses()
            self._log_partitions()
            self._log_lag()
            self._dispatcher.check_long_running()
            if self._reachability is not None:
                self._reachability.check(self.clients)
            check_ms = self._check_ms

    @property
    def _check_ms(self) -> int:
        if self._handing_over or any(client.state.intake.held for client in self._clients.values()):
            return CHECK_MS_MAX
        return max(CHECK_MS_MAX, self._settings.ttl_ms // IDLE_CHECKS_PER_TTL)

    def _record_loss(self, client: SessionShell) -> bool:
        """Record why the partition was lost. Return False if it was not lost: the metaserver or the
        user requested the hand-over.
        """
        now_ms, tenure = self._clock.boot_ms(), client.state.tenure
        if tenure.fence is not None:
            reason = FENCED
        elif client.lapsed:
            silent_ms = now_ms - client.renewed_ms
            stalled_ms = self._stalls.longest_ms(client.renewed_ms, now_ms)
            reason = lapse_reason(silent_ms=silent_ms, stalled_ms=stalled_ms)
        elif tenure.lease.session != self._membership.session and not self._closing:
            reason = SESSION_ENDED
        else:
            return False
        token, fence = tenure.lease.token, tenure.fence or 0
        self._losses.add(client.partition_id, token, reason, fence=fence)
        return True

    def _log_stall(self) -> None:
        now_ms = self._clock.boot_ms()
        settings, late_ms = self._settings, self._stalls.record_wake(now_ms)
        text = self._stalls.line(
            late_ms, now_ms, ttl_ms=settings.ttl_ms, margin_ms=settings.margin_ms
        )
        if text and self._group:  # a broadcast consumer has no leases
            log.warning("%s: %s", self._name, text)

    def _log_partitions(self) -> None:
        if self._closing:
            return
        now_ms, waits_for = self._clock.boot_ms(), WAITS
        if not self._clients and self.waiting_for:  # it is suspended
            waits_for = f"it waits for {self.waiting_for}"
        text = self._lines.format_partitions(self._clients, now_ms, waits_for)
        if not text or not log.isEnabledFor(logging.INFO):
            return
        if waits_for is WAITS and not self._clients and isinstance(self._membership, Membership):
            if self._waiting_task is not None:
                self._waiting_task.cancel()
            self._waiting_task = start_task(
                self._log_waiting(self._membership, text), name="log waiting"
            )
            return
        log.info("%s %s", self._name, text)

    async def _log_waiting(self, membership: Membership, text: str) -> None:
        """Log why the consumer has no partition, and what the metaserver reports about the other
        members.
        """
        try:
            waits_for = waiting_text(await membership.group(), membership.client)
        except UnreachableError as error:
            waits_for = unanswered_text(error)
        except KeylaneError:
            waits_for = WAITS
        text = text.replace(WAITS, waits_for)
        if not self._clients:
            log.info("%s %s", self._name, text)

    def _log_lag(self) -> None:
        positions = [client.position for client in self._clients.values()]
        messages = sum(position.lag_messages for position in positions)
        seconds = max((position.lag_s for position in positions), default=0.0)
        if text := self._lines.format_lag(messages, seconds, self._clock.boot_ms()):
            log.info("%s %s", self._name, text)

    def _log_losses(self, *, last: bool = False) -> None:
        for text in self._losses.take_lines(self._clock.boot_ms(), last=last):
            log.warning("%s %s", self._name, text)


def _ignore(error: BaseException) -> None:
    """Replaces `fail` after the consumer is closed."""
