"""The partitions assigned to a consumer: grants are compared with pull clients, which are made and
ended.

    granted ─▶ new: make a client    kept: renew it    gone, lapsed, or under another token: end it
                                                                                              │
               stop pulling ─▶ finish or cancel handlers ─▶ send acks ─▶ release ─▶ report ◀──╯

Each partition is handed over in a task of its own, so that a slow handler of one partition delays
no other.

Invariants
    A partition has at most one client, or one hand-over under way. A token that is for single use,
    or fenced, is never used again: no message is handled twice under it. The release of a partition
    is reported to the metaserver only after its handlers have ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.clock import Clock
from ..protocol.codecs.codec import Codec
from ..protocol.control import Grant, Grants
from ..protocol.ids import MAX_I64
from ..protocol.message import Message
from ..protocol.operations import SubjectHistory
from ..protocol.routing import ConsumeStrategy
from ..rpc.connections import Connections
from ..rpc.race import start_task
from .broadcast import Broadcast
from .delivery.alone_turn import AloneTurn
from .delivery.filter import MessageFilter
from .handling.stream import Stream
from .handling.workers import Workers
from .log_names import consumer_name
from .membership import Membership
from .places import BrokerPlaces
from .pull_room import PullRoom
from .pulling.acked_first import AckedFirstClient, AckedFirstSharedClient
from .pulling.losses import FENCED, SESSION_ENDED, Losses, Stalls, why_lapsed
from .pulling.pull_client import PullClient
from .pulling.shared_client import SharedClient
from .rebalance import Rebalance
from .settings import AckMode, ConsumerSettings, FullPolicy
from .told import Told

log = logging.getLogger("keylane.consumer")

CHECK_MS_MAX = 1_000
"""The longest time, in milliseconds, between two checks for lapsed leases, long-running handlers
and a blocked event loop.
"""
IDLE_CHECKS_PER_TTL = 10
"""The number of checks in a ttl while no message is with a handler, if the interval is longer than
CHECK_MS_MAX, so that many idle consumers cost little. A stall may then be measured too short by
this interval.
"""
ENDED_TOKENS_MAX = 10_000
"""The number of partitions, beyond the granted ones, whose ended tokens are kept: partitions are
granted and released for as long as a consumer lives.
"""


class Assignments:
    """
    The pull clients of one opening of a consumer, by partition.

    It is the `GrantHolder` of the membership, and the `PullOwner` of each pull client.

    Args:
        dispatch: gets the messages, and ends their handlers.
        fail: called with an error that ends the consumer.
        rebalance: notifies the user of partitions that are granted and lost.
        wanted: the filter for messages that the user wants; None: all.
        alone: the turn of messages that may end the process; None: the consumer has one of its own.
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
        dispatch: Workers | Stream,
        codec: Codec[Any] | None,
        fail: Callable[[BaseException], None],
        rebalance: Rebalance | None = None,
        wanted: MessageFilter | None = None,
        alone: AloneTurn | None = None,
    ) -> None:
        self.alone = alone or AloneTurn()
        # Messages that wait until they form a batch would otherwise wait for room that they
        # themselves take.
        self.room = PullRoom(MAX_I64) if settings.max_wait_ms else PullRoom()
        self.codec = codec
        self.wanted = wanted
        self.keeps_batches = isinstance(dispatch, Stream)
        """True for a consumer without a handler, which opens batches only when it is known how the
        program takes messages.
        """
        self._rebalance = rebalance or Rebalance(limit_ms=settings.handover_ms)
        self._subject = subject
        self._group = group
        self._name = consumer_name(subject, group)
        self._settings = settings
        """The settings in force; a value stored for the group takes precedence over the code."""
        self._told = Told(subject=subject, group=group, client=membership.client, settings=settings)
        self._clock = clock
        self._rng = rng
        self._connections = connections
        self._membership = membership
        self.by_hand = isinstance(dispatch, Stream)
        """True if the program itself takes and acks messages, even once this is closed."""
        self._dispatch = dispatch
        if settings.consume_strategy is ConsumeStrategy.SHARED:
            dispatch.on_idle = self._wake_pulls
        self._fail = fail
        self._clients: dict[int, PullClient] = {}
        self._ending: dict[int, PullClient] = {}
        self._hand_overs: dict[int, asyncio.Task[None]] = {}
        """The task for each client in `_ending`."""
        self._ended_tokens: dict[int, int] = {}
        """The highest token of each partition that is not used again, in the order in which they
        ended.
        """
        self._reports: set[asyncio.Task[None]] = set()
        self._grants: tuple[Grant, ...] = ()
        self._deadline_ms = 0
        self._closing = False
        self._announcing: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stalls = Stalls()
        self._losses = Losses()
        self._places: BrokerPlaces | None = None
        """The places of brokers; None if no other consumer would get the partitions that this one
        does not reach.
        """

    def forked(self) -> None:
        """Let no handler start in this process, which is a child: the leases belong to the
        parent.
        """
        for client in (*self._clients.values(), *self._ending.values()):
            client.start_no_more()

    def start(self) -> None:
        """Begin to watch for the end of leases, and for brokers that are not reached."""
        exclusive = self._settings.consume_strategy is ConsumeStrategy.EXCLUSIVE
        if exclusive and isinstance(self._membership, Membership):
            self._places = BrokerPlaces(
                self._name,
                self._group,
                membership=self._membership,
                connections=self._connections,
                clock=self._clock,
                ttl_ms=self._settings.ttl_ms,
            )
        self._watch = start_task(self._watch_deadline(), name="lease deadline")

    @property
    def clients(self) -> list[PullClient]:
        """Return the clients that are not ending, by partition id."""
        return [self._clients[key] for key in sorted(self._clients)]

    @property
    def ending(self) -> list[PullClient]:
        """Return the clients whose partition is being handed over, by partition id."""
        return [self._ending[key] for key in sorted(self._ending)]

    async def takes_messages(self) -> bool:
        """Wait until it is known how the program takes messages, and return False if it takes Arrow
        data.
        """
        return not isinstance(self._dispatch, Stream) or await self._dispatch.takes_messages()

    @property
    def waiting_for(self) -> str:
        """Return, for people, who has suspended the consumer, and which partitions it handles one
        message at a time; otherwise "".
        """
        own = "resume(): its own code has suspended it" if self._membership.suspended else ""
        careful = [str(client.partition_id) for client in self.clients if client.is_careful]
        suspects = (
            f"suspects of partition {', '.join(careful)}: two consumers before it ended without "
            f"handing over, and what "
            "both of them had is handled one message at a time"
            if careful
            else ""
        )
        return "; ".join(filter(None, (own, self._told.waiting_for, suspects)))

    @property
    def redrives(self) -> bool:
        """Return True if parked messages are handled again, as often as needed; they are not if the
        program takes Arrow data.
        """
        if self._settings.ack is AckMode.BEFORE:
            return False
        return not (isinstance(self._dispatch, Stream) and self._dispatch.takes_batches)

    @property
    def buries_when_full(self) -> bool:
        """Return True if keys become dead letters where the group can park no more."""
        return self._settings.on_full is FullPolicy.DEAD

    # ── called by the membership: GrantHolder ─────────────────────────────────────────────────────
    def granted(self, grants: Grants, deadline_ms: int) -> None:
        """Take every partition granted now; all leases end at `deadline_ms` on the boot clock."""
        self._deadline_ms = deadline_ms
        if self._told.take(grants):
            self._settings = self._told.settings
            self._dispatch.adopt(self._settings)
        for client in self.ending:
            if client.session == self._membership.session:
                client.renew(deadline_ms, None)
        self._apply(grants.grants)

    def session_lost(self) -> None:
        """Hand all partitions over: the grants ended with the session."""
        self.hand_over_all()

    def drained(self) -> tuple[int, ...]:
        """Return the ids of sealed partitions that the group has acked to the end."""
        return tuple(client.partition_id for client in self.clients if client.drained)

    def parked(self) -> tuple[int, ...]:
        """Return the ids of those drained partitions on which the group has parked messages."""
        return tuple(
            client.partition_id for client in self.clients if client.drained and client.has_parked
        )

    def holding(self, session: str) -> tuple[tuple[int, int], ...]:
        """Return (partition id, token) for each partition that `session` has here or is still
        handing over.
        """
        clients = sorted((self._clients | self._ending).items())
        return tuple((key, client.token) for key, client in clients if client.session == session)

    def unreached(self) -> tuple[str, ...]:
        """Return the broker groups to which the consumer gets no connection although they report to
        the cluster.
        """
        return () if self._places is None else self._places.unreached

    def fail(self, error: BaseException) -> None:
        """End the consumer."""
        self._fail(error)

    # ── called by pull clients: PullOwner ─────────────────────────────────────────────────────────
    def hand_out(self, messages: list[Message]) -> None:
        """Give messages of one partition to handlers or the iteration."""
        self._dispatch.put(messages)

    def hand_out_batch(self, batch: Any) -> None:
        """Give a batch of one partition, which is not opened, to handlers or the iteration."""
        self._dispatch.put_batch(batch)

    def nack(self, message: Message, after_s: float) -> list[Message]:
        """Let the iteration hand a message out again; a message that a handler has never arrives
        here.
        """
        assert isinstance(self._dispatch, Stream)
        return self._dispatch.nack(message, after_s)

    @property
    def lying(self) -> Message | None:
        """Return a message that was given back, or waits after such a message, and that the program
        may take now; None if there is none.
        """
        assert isinstance(self._dispatch, Stream)
        return self._dispatch.lying

    def acked_again(self, messages: Sequence[Message]) -> None:
        """Let later messages of their keys be handed out."""
        assert isinstance(self._dispatch, Stream)
        self._dispatch.acked_again(messages)

    @property
    def spare(self) -> int:
        """Return the number of further messages for which a worker is free; if it is negative, that
        many wait for a worker.
        """
        return self._dispatch.spare

    def held(self, client: PullClient) -> list[Message]:
        """Return the client's messages that are with handlers, or with the body of the program's
        loop.
        """
        return self._dispatch.held(client)

    def passed_over(self, message: Message) -> None:
        """Count a failed try for a message of a shared group that the program has not acked in
        time.
        """
        assert isinstance(self._dispatch, Stream)
        self._dispatch.passed_over(message)

    def _wake_pulls(self) -> None:
        """Let pulls that wait for a free worker check again."""
        for client in self._clients.values():
            if isinstance(client, SharedClient):
                client.wake()

    async def history(self) -> SubjectHistory:
        """Return every partition that the subject ever had."""
        return await self._membership.history()

    def report_drained(self) -> None:
        """Send the next heartbeat now: it lists the drained partitions."""
        self._membership.nudge()

    def end(self, client: PullClient) -> None:
        """Hand the client's partition over, in a separate task."""
        partition_id = client.partition_id
        if self._clients.get(partition_id) is not client:
            return
        del self._clients[partition_id]
        client.stop()
        if client.token_is_single_use or client.fenced:
            self._note_ended(partition_id, client.token)
        self._ending[partition_id] = client
        self._hand_overs[partition_id] = start_task(
            self._end(client), name=f"hand over {partition_id}"
        )

    def _note_ended(self, partition_id: int, token: int) -> None:
        """Note a token that is not used again; old tokens are dropped, because they are granted no
        more, and their partitions may be gone.
        """
        ended = self._ended_tokens
        ended.pop(partition_id, None)
        ended[partition_id] = token
        if len(ended) > ENDED_TOKENS_MAX + len(self._grants):
            del ended[next(iter(ended))]

    # ── grants compared with clients ──────────────────────────────────────────────────────────────
    def _apply(self, grants: tuple[Grant, ...]) -> None:
        """Renew, make and end clients, so that there is a client for each grant."""
        if self._closing:
            return
        self._grants = grants
        granted = {int(grant.partition.partition_id): grant for grant in grants}
        for partition_id, client in list(self._clients.items()):
            grant = granted.get(partition_id)
            if grant is None or grant.token != client.token or client.lapsed:
                self.end(client)
            else:
                client.renew(self._deadline_ms, grant.partition.address)
                client.parking.regranted(grant)
        for partition_id, grant in granted.items():
            if partition_id in self._clients or partition_id in self._hand_overs:
                continue
            if grant.token <= self._ended_tokens.get(partition_id, -1):
                self._report_again(grant)
            elif grant.partition.address is not None and self._clock.boot_ms() < self._deadline_ms:
                client = self._clients[partition_id] = self._make(grant)
                self._rebalance.assigned(client)

    def _make(self, grant: Grant) -> PullClient:
        shared = self._settings.consume_strategy is ConsumeStrategy.SHARED
        kind: Callable[..., PullClient] = SharedClient if shared else PullClient
        if self._settings.ack is AckMode.BEFORE:
            kind = AckedFirstSharedClient if shared else AckedFirstClient
        if isinstance(self._membership, Broadcast):
            kind = self._membership.client_kind(int(grant.partition.partition_id))
        return kind(
            subject=self._subject,
            group=self._group,
            session=self._membership.session,
            grant=grant,
            connections=self._connections,
            deadline_ms=self._deadline_ms,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            owner=self,
        )

    # ── hand-over ─────────────────────────────────────────────────────────────────────────────────
    async def _end(self, client: PullClient) -> None:
        try:
            await self._hand_over(client)
        except BaseException as error:
            # This is a bug, or the end of the event loop. Remaining tasks would send acks for a
            # consumer that is closed.
            client.abandon()
            if isinstance(error, Exception):
                self._fail(error)
            raise
        finally:
            del self._hand_overs[client.partition_id]
            del self._ending[client.partition_id]
        if client.partition_id in {int(grant.partition.partition_id) for grant in self._grants}:
            self._apply(self._grants)  # granted again during the hand-over

    async def _hand_over(self, client: PullClient) -> None:
        lost = self._note_loss(client)
        iterated = isinstance(self._dispatch, Stream)  # its user may still ack the messages in hand
        if iterated:
            await self._rebalance.ends(client.partition_id, lost=lost)
        await self._dispatch.quiesce(client)
        if not iterated:
            await self._rebalance.ends(client.partition_id, lost=lost)
        await client.hand_over(flush_ms=self._settings.call_timeout_ms)
        if self._announcing is not None:
            await asyncio.wait([self._announcing])
        if client.fenced:
            # Usually a newer owner has the partition. If not, it is granted above the fence; the
            # pause keeps that rare.
            await asyncio.sleep(self._settings.backoff.wait_ms(1, self._rng) / 1000)
        if (
            client.token_is_single_use or client.fenced
        ):  # otherwise other sessions have the token too
            await self._membership.report_released(
                client.session, client.partition_id, client.token, fence=client.life.fence
            )

    def _report_again(self, grant: Grant) -> None:
        """Report a release again: the metaserver has not received it, and still grants the
        token.
        """
        partition_id = int(grant.partition.partition_id)
        report = self._membership.report_released(
            self._membership.session, partition_id, grant.token
        )
        task = start_task(report, name=f"give back {partition_id}")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def hand_over_all(self) -> list[asyncio.Task[None]]:
        """Begin to hand every partition over, and return a task for each hand-over under way."""
        self._grants = ()
        for client in self.clients:
            self.end(client)
        return list(self._hand_overs.values())

    def stop(self) -> None:
        """Take no more grants, and let no handler start; `close` then hands every partition
        over.
        """
        self._closing = True
        for client in self.clients:
            client.stop()

    async def close(self) -> None:
        """Take no more grants, and hand every partition over."""
        assert self._watch is not None
        self._watch.cancel()
        if self._places is not None:
            self._places.close()
        self._closing = True
        hand_overs = self.hand_over_all()
        if hand_overs:
            self._announcing = start_task(self._membership.announce_leave(), name="announce leave")
        await asyncio.gather(self._watch, *hand_overs, *self._reports, return_exceptions=True)
        self._log_losses()

    def let_go(self) -> None:
        """
        Drop the references to the consumer; every partition is handed over, and no further call
        arrives.

        Messages refer to this object through their pull clients, and the garbage collector does not
        track messages: a message that a handler's object keeps would keep that handler, and so the
        consumer, alive for ever.
        """
        self._fail = _ignore
        self._dispatch.on_idle = None
        del self._dispatch, self._membership, self._rebalance
        self._places = None

    # ── leases that end, and why ──────────────────────────────────────────────────────────────────
    async def _watch_deadline(self) -> None:
        """End clients whose lease lapsed, which cancels their handlers; log stalls and losses."""
        # A handler that blocks often does so with its first messages, so the first check is soon.
        check_ms = self._settings.margin_ms
        while True:
            left_ms = self._deadline_ms - self._clock.boot_ms()
            if left_ms <= 0:
                for client in self.clients:
                    if client.lapsed:
                        self.end(client)
                left_ms = self._settings.margin_ms
            # The checks of all consumers on the machine coincide, so that one wake-up of the
            # processor serves many.
            sleep_ms = min(left_ms, check_ms - self._clock.boot_ms() % check_ms)
            self._stalls.sleeps(self._clock.boot_ms(), sleep_ms)
            await asyncio.sleep(sleep_ms / 1000)
            self._log_stall()
            self._log_losses()
            self._dispatch.look()
            if self._places is not None:
                self._places.look(self.clients)
            check_ms = self._check_ms

    @property
    def _check_ms(self) -> int:
        if self._ending or any(client.has_messages_out for client in self._clients.values()):
            return CHECK_MS_MAX
        return max(CHECK_MS_MAX, self._settings.ttl_ms // IDLE_CHECKS_PER_TTL)

    def _note_loss(self, client: PullClient) -> bool:
        """Note the reason for the end of `client`, and return False if the metaserver or the user
        asked for it.
        """
        now_ms = self._clock.boot_ms()
        if client.fenced:
            why = FENCED
        elif client.lapsed:
            silent_ms = now_ms - client.renewed_ms
            stalled_ms = self._stalls.longest_ms(client.renewed_ms, now_ms)
            why = why_lapsed(silent_ms=silent_ms, stalled_ms=stalled_ms)
        elif client.session != self._membership.session and not self._closing:
            why = SESSION_ENDED
        else:
            return False
        self._losses.note(client.partition_id, client.token, why, fence=client.life.fence)
        return True

    def _log_stall(self) -> None:
        now_ms = self._clock.boot_ms()
        settings, late_ms = self._settings, self._stalls.woke(now_ms)
        text = self._stalls.line(
            late_ms, now_ms, ttl_ms=settings.ttl_ms, margin_ms=settings.margin_ms
        )
        if text and self._group:  # a broadcast consumer has no leases
            log.warning("%s: %s", self._name, text)

    def _log_losses(self) -> None:
        for text in self._losses.take():
            log.warning("%s %s", self._name, text)


def _ignore(error: BaseException) -> None:
    """Ignore an error of a consumer that is closed."""
