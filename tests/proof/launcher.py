"""Runs one of our programs under watch: `python launcher.py [options] MODULE ARGUMENT…`.

    --record FILE      a broker writes down the calls it accepted; see `recording`
    --grants           a metaserver writes down its grants, in a table of its own
    --wall FILE        the program's calendar is off by as many seconds as the file says (eight bytes), at any time
    --detour JSON      addresses in whose place others are called
    --mutant NAME      a bug is put in, for control runs

The program itself has no setting for any of this.
"""

from __future__ import annotations

import argparse
import json
import mmap
import runpy
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

SECONDS = struct.Struct("<q")


def move_calendar(path: str) -> None:
    """From now on `time.time` is off, also under the names that modules have given it."""
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), SECONDS.size, access=mmap.ACCESS_READ)
    seconds, seconds_ns, unpack = time.time, time.time_ns, SECONDS.unpack_from
    moved = {
        seconds: lambda: seconds() + unpack(shared)[0],
        seconds_ns: lambda: seconds_ns() + unpack(shared)[0] * 1_000_000_000,
    }
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, BuiltinFunctionType) and value in moved:
                setattr(module, name, moved[value])
    from keylane.protocol.clock import SystemClock

    SystemClock.wall_ns = staticmethod(time.time_ns)  # a fork has imported it before


def take_detours(detours: dict[str, str]) -> None:
    """Calls to one address go to another, through which a test may cut them."""
    from keylane.rpc.http_network import HttpNetwork

    open_channel, control = HttpNetwork.open_channel, HttpNetwork.control

    async def open_there(self: Any, address: str, **options: Any) -> Any:
        return await open_channel(self, detours.get(address, address), **options)

    async def control_there(self: Any, method: str, address: str, *rest: Any, **body: Any) -> Any:
        return await control(self, method, detours.get(address, address), *rest, **body)

    HttpNetwork.open_channel = open_there  # type: ignore[method-assign]
    HttpNetwork.control = control_there  # type: ignore[method-assign]


def watch_broker(path: Path) -> None:
    """Record every accepted call that needs the fence."""
    from keylane.broker.service import BrokerService
    from proof.recording import Recorder, boot_ns
    from support.observation import served

    record = Recorder(path)
    real = BrokerService.handle

    async def handle(self: Any, request: Any, payload: Any) -> Any:
        began = boot_ns()
        answer, data = await real(self, request, payload)
        event = served(request, answer, began)
        if event is not None:
            record(event)
        return answer, data

    BrokerService.handle = handle  # type: ignore[method-assign]


def watch_grants() -> None:
    """Compare the leases before and after each transaction; what is new goes into it as well."""
    from keylane.metaserver.sql.group_write import GroupCommitWriter
    from proof.recording import GRANTS, boot_ns
    from support.sql.grants import Leases

    columns = "at_ns, group_id, partition_id, token, session, holder, holder_left_ms"
    insert = f"INSERT INTO {GRANTS} ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"

    def noting(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(connection: Any) -> Any:
            ask = connection.exec_driver_sql
            if not ask("SELECT 1 FROM sqlite_master WHERE name = 'leases'").all():
                return work(connection)
            before = Leases.read(lambda text: ask(text).all())
            result = work(connection)
            ask(f"CREATE TABLE IF NOT EXISTS {GRANTS} ({columns})")
            at_ns = boot_ns()
            for event in before.granted(lambda text: ask(text).all(), now_ms=at_ns // 1_000_000):
                ask(insert, (at_ns, *event))
            return result

        return noted

    real = GroupCommitWriter.submit

    async def submit(self: Any, work: Any, **options: Any) -> Any:
        return await real(self, noting(work), **options)

    GroupCommitWriter.submit = submit  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--grants", action="store_true")
    parser.add_argument("--wall")
    parser.add_argument("--detour", type=json.loads, default={})
    parser.add_argument("--mutant")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.wall:
        move_calendar(options.wall)
    if options.detour:
        take_detours(options.detour)
    if options.record:
        watch_broker(options.record)
    if options.grants:
        watch_grants()
    if options.mutant:
        from sim.mutants.bank import MUTANTS
        from sim.mutants.mutant import Patches

        MUTANTS[options.mutant].breaks(Patches())
    sys.argv = [options.module, *options.arguments]
    if options.module.startswith("keylane."):
        sys.exit(import_module(f"{options.module}.__main__").main())
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
