"""A broker that keeps scheduled messages too, as brokers do in production."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from keylane.broker.peers import Peers
from keylane.broker.posting import MessagePosting
from keylane.broker.registration import Registration
from keylane.broker.scheduled.agenda import ScheduledAgenda
from keylane.broker.scheduled.records import Delivered
from keylane.broker.scheduled.schedule_index import ScheduleIndex
from keylane.broker.scheduled.scheduler import Scheduler
from keylane.broker.scheduling import Scheduling
from keylane.broker.service import BrokerService
from keylane.broker.store.store import Store
from keylane.protocol.frames import CancelScheduled, Schedule
from keylane.testing.machines.network import SimNetwork
from sim.actors.hosts import BrokerHost


class SchedulingBrokerHost(BrokerHost):
    """See the module."""

    scheduler: Scheduler | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.delivered: Counter[str] = Counter()
        """By the id of a message, how often the word that it is delivered became durable."""

    def _begin_more(
        self, store: Store, service: BrokerService, registration: Registration, network: SimNetwork
    ) -> None:
        rng = random.Random(f"{self.name} scheduled {self.starts}")
        assert isinstance(store.agenda, ScheduledAgenda)
        scheduler = self.scheduler = Scheduler.open(
            self.disk,
            store.agenda,
            store,
            clock=self.machine,
            rng=random.Random(rng.getrandbits(64)),
            broker_group=self.group,
            count_max=10_000,
            bytes_max=1 << 24,
        )
        self._note_deliveries(scheduler._schedule_index)
        peers = Peers(service, self.group, self._meta, network)
        posting = MessagePosting(peers, clock=self.machine, rng=rng)
        scheduling = Scheduling(
            scheduler,
            peers,
            broker_group=self.group,
            clock=self.machine,
            random_bits=rng.getrandbits,
            folder_ownership=registration,
            check_writable=lambda: store.commit.check_room(0),
        )
        service.register_handler(Schedule, scheduling.schedule)
        service.register_handler(CancelScheduled, scheduling.cancel)
        self.spawn(scheduler.run(posting, registration), self.process.context.copy())

    def _note_deliveries(self, index: ScheduleIndex) -> None:
        on_delivered = index.on_delivered

        def note(record: Delivered, position: int) -> None:
            self.delivered.update(scheduled_id.hex() for scheduled_id in record.scheduled_ids)
            on_delivered(record, position)

        index.on_delivered = note  # type: ignore[method-assign]

    @property
    def keeps(self) -> bool:
        """Whether scheduled messages, or deliveries of them, are left; unknown, and so True, while
        it is down.
        """
        scheduler = self.scheduler if self.running else None
        return scheduler is None or bool(
            scheduler._schedule_index.entries
            or scheduler._schedule_index.deliveries
            or scheduler._pending_messages
        )
