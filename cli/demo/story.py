"""The demo's scenario: flights are sent, a consumer and a broker are killed, and everything is
checked.

    servers ─▶ subject ─▶ consumers ─▶ a third handled: kill a consumer
            ─▶ two thirds sent: kill a broker and remove its folder ─▶ all handled
            ─▶ compare Spark, the log and the records with the file ─▶ verdict

Sending pauses at one half and at five sixths until the processes have been killed, so that they die
under load, no matter how fast the machine is or how few rows there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from ...checker.events import Looked
from ...producer import Producer
from ...protocol.clock import SystemClock
from ...protocol.errors import (
    InternalError,
    QueueFullError,
)
from ...protocol.routing import OrderStrategy
from .cluster import BROKER_TO_LOSE, CONSUMERS, GROUP, SUBJECT, TTL_MS, DemoCluster
from .history import JUDGED_GROUP, JudgedRun, PartitionLog, SentRows, judge_run
from .log import read_log
from .report import (
    Result,
    Screen,
    Verdict,
    find_problems,
    is_same_table,
)
from .source import ROW_PROPERTY, Ledger, flights_file, read_flights
from .spark_job import SparkResult

FAILOVER_LIMIT_S = TTL_MS / 1000 + 1.0
STEP_TIMEOUT_S = 120.0
"""Timeout for each step, in seconds; far more than a slow machine needs."""
SPARK_TIMEOUT_S = 180.0
WATCH_INTERVAL_S = 0.1


class Scenario:
    """One run of the demo."""

    def __init__(self, rows: int, cluster: DemoCluster, screen: Screen) -> None:
        self.rows = rows
        self.cluster = cluster
        self.screen = screen
        self.ledger = Ledger()
        self.cursors: list[Looked] = []
        self.failover_seconds = 0.0
        self.started = time.monotonic()
        self._failed_over = asyncio.Event()
        self._broker_killed = asyncio.Event()
        self._consumer_killed = asyncio.Event()
        self._drained: dict[int, bool] = {}
        self._producer: Producer

    async def run(self) -> Verdict:
        """
        Run the whole scenario and return the verdict.

        Raises:
            KeylaneError: a step failed.
        """
        cluster, say = self.cluster, self.screen.say
        path = flights_file()
        await cluster.start_servers(
            lambda server: say(f"{server.name} is ready at {server.address}, process {server.pid}")
        )
        await self._run_within("the subject", cluster.create_subject())
        say(
            f"subject {SUBJECT}: {len(cluster.partitions)} partitions on "
            f"{len(cluster.brokers)} brokers"
        )
        await self._run_within("the copy", cluster.start_copy())
        say(f"broker-{BROKER_TO_LOSE} has a copy of its data folder; its acks wait for the copy")
        cluster.spark.start()
        await self._run_within("the consumers", cluster.start_consumers())
        say(f"{CONSUMERS} consumers of group {GROUP} share the partitions")
        async with Producer(cluster.meta_address, order_strategy=OrderStrategy.STRICT) as producer:
            self._producer = producer
            try:
                async with asyncio.TaskGroup() as tasks:
                    watch_task = tasks.create_task(self._watch())
                    kill_task = tasks.create_task(self._kill())
                    await self._send(path)
                    await kill_task
                    await self._run_within("the last messages", self._wait_until_drained())
                    watch_task.cancel()
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            stats = producer.stats
        await cluster.stop_consumers()
        self._poll()
        return await self._judge(stats.acked, stats.failed, stats.retries)

    async def _run_within(self, step: str, work: Awaitable[object]) -> None:
        """Await a step of the scenario. Raises InternalError after STEP_TIMEOUT_S."""
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await work
        except TimeoutError:
            raise InternalError(f"{step}: not done after {STEP_TIMEOUT_S:.0f} s") from None

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    async def _send(self, path: Path) -> None:
        """Send all rows in file order, as fast as the producer's queue accepts them."""
        producer, ledger = self._producer, self.ledger
        events_by_row = {
            self.rows // 2: self._consumer_killed,
            self.rows * 2 // 3: self._failed_over,
            self.rows * 5 // 6: self._broker_killed,
        }
        for flight in read_flights(path, self.rows):
            row = ledger.add(flight)
            if row in events_by_row:
                await self._run_within("the next act", events_by_row[row].wait())
            properties = {ROW_PROPERTY: str(row)}
            while True:
                try:
                    producer.send(SUBJECT, flight.value, key=flight.key, properties=properties)
                    break
                except QueueFullError:
                    await producer.drain()
            if row % 200 == 0:
                await asyncio.sleep(0)
        await self._run_within("the answers to the producer", producer.flush())

    # ── killing processes ─────────────────────────────────────────────────────────────────────────
    async def _kill(self) -> None:
        """Kill the busiest consumer, wait for the failover, and then kill a broker for good, with
        its data folder: the copy takes its place.
        """
        cluster, say = self.cluster, self.screen.say
        await self._wait_until("a third handled", lambda: self._handled_count() >= self.rows // 3)
        name, tokens = cluster.busiest_consumer(await cluster.group())
        killed_at_ms = SystemClock.boot_ms()
        await cluster.consumers.pop(name).kill()
        self._consumer_killed.set()
        partition_ids = ", ".join(map(str, sorted(tokens)))
        say(f"{name} killed with SIGKILL; it had partition {partition_ids}")
        await self._wait_until(
            "the fail-over", lambda: len(self._takeover_times(name, tokens)) == len(tokens)
        )
        self.failover_seconds = (max(self._takeover_times(name, tokens)) - killed_at_ms) / 1000
        say(f"its partitions are handled by others, {self.failover_seconds:.2f} s after its death")
        self._failed_over.set()

        acked_min = self.rows * 2 // 3 + self.rows // 50
        await self._wait_until("two thirds sent", lambda: self._producer.stats.acked >= acked_min)
        broker = cluster.brokers[BROKER_TO_LOSE - 1]
        lost = asyncio.create_task(cluster.lose_broker())
        say(f"{broker.name} killed with SIGKILL, and its data folder removed")
        self._broker_killed.set()
        await lost
        say(f"{broker.name} serves again, from the copy of its folder")

    def _takeover_times(self, killed_name: str, tokens: dict[int, int]) -> list[int]:
        """Return when each partition of the killed consumer was first handled with a higher token,
        in milliseconds since boot.
        """
        takeover_ms: dict[int, int] = {}
        for name, tail in self.cluster.tails.items():
            for (partition_id, token), at_ms in tail.first_at_ms.items():
                if name != killed_name and token > tokens.get(partition_id, token):
                    takeover_ms[partition_id] = min(at_ms, takeover_ms.get(partition_id, at_ms))
        return list(takeover_ms.values())

    async def _wait_until(self, step: str, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():  # noqa: ASYNC110 - it happens in other processes
                await asyncio.sleep(0.01)

        await self._run_within(step, wait())

    # ── watching ──────────────────────────────────────────────────────────────────────────────────
    async def _watch(self) -> None:
        """Poll progress, cursors and process health several times per second."""
        while True:
            self._poll()
            for restart_count, status in await self.cluster.statuses():
                for partition in status.partitions:
                    for group in partition.groups:
                        if group.group == GROUP:
                            self.cursors.append(
                                Looked(
                                    JUDGED_GROUP,
                                    partition.partition_id,
                                    group.token,
                                    group.cursor,
                                    group.acked_above,
                                    restart_count,
                                )
                            )
                            self._drained[partition.partition_id] = (
                                group.cursor == partition.next_offset
                            )
            self.cluster.check()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _poll(self) -> None:
        for tail in self.cluster.tails.values():
            tail.poll()
        self.screen.progress(self._producer.stats.acked, self._handled_count())

    def _handled_count(self) -> int:
        return sum(len(tail.records) for tail in self.cluster.tails.values())

    async def _wait_until_drained(self) -> None:
        """Wait until the group has acked every message of every partition."""
        self._drained.clear()
        while not self._is_drained():  # noqa: ASYNC110 - it happens in other processes
            await asyncio.sleep(0.02)

    def _is_drained(self) -> bool:
        return len(self._drained) == len(self.cluster.partitions) and all(self._drained.values())

    # ── judging ───────────────────────────────────────────────────────────────────────────────────
    async def _judge(self, sent: int, failed: int, retries: int) -> Verdict:
        self.screen.say("every message is handled and acked")
        try:
            async with asyncio.TaskGroup() as tasks:
                spark_task = tasks.create_task(self._run_spark_job())
                check_task = tasks.create_task(self._check())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        spark_result = spark_task.result()
        judged_run, logs = check_task.result()
        stored_counts = {
            partition_id: len(log.rows) for partition_id, log in logs.items() if log.rows
        }
        result = Result(
            sent=sent,
            stored=judged_run.stored,
            handled=judged_run.handled,
            redelivered=judged_run.redelivered,
            lost=judged_run.lost,
            order_violations=judged_run.findings.order_violations,
            stale_acks=judged_run.findings.counts["stale effect"],
            failover_seconds=round(self.failover_seconds, 2),
            spark_rows=spark_result.rows,
            spark_matches_csv=is_same_table(spark_result.carriers, self.ledger.carriers())
            and spark_result.partitions == stored_counts,
            seconds=round(time.monotonic() - self.started, 1),
        )
        return Verdict(
            result=result,
            findings=judged_run.findings,
            carriers=spark_result.carriers,
            failover_limit_s=FAILOVER_LIMIT_S,
            retries=retries,
            problems=find_problems(
                result,
                judged_run.findings,
                rows=self.rows,
                failover_limit_s=FAILOVER_LIMIT_S,
                failed=failed,
            ),
        )

    async def _run_spark_job(self) -> SparkResult:
        """Let Spark read the subject and return its result."""
        program = self.cluster.spark
        with self.screen.time_step("Spark reads the subject"):
            await program.wait_until_ready(SPARK_TIMEOUT_S)
            program.write_line("go")
            line = await program.read_line(SPARK_TIMEOUT_S)
        try:
            return msgspec.json.decode(line, type=SparkResult)
        except msgspec.MsgspecError as error:
            raise InternalError(f"Spark's result is unreadable: {error}") from error

    async def _check(self) -> tuple[JudgedRun, dict[int, PartitionLog]]:
        """Check the log and the records against the file. This is done in a thread, so that the
        screen is not blocked.
        """
        cluster = self.cluster
        with self.screen.time_step("checking every message"):
            logs = {
                int(partition.partition_id): await read_log(cluster.network, partition)
                for partition in cluster.partitions
            }
            judged_run = await asyncio.to_thread(
                judge_run,
                SentRows(self.ledger.keys, self.ledger.digests),
                logs,
                {name: tail.records for name, tail in cluster.tails.items()},
                self.cursors,
            )
        return judged_run, logs
