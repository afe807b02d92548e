"""`keylane group` create, set, suspend, resume."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ....admin import Admin, GroupDescription, GroupSettings, ResetTo
from ....consumer.manifest_file import PREFIX, manifest_start
from ....protocol.clock import SystemClock
from ....protocol.errors import ConfigError
from ....protocol.groups import FailurePolicy, FullPolicy
from ....protocol.routing import ConsumeStrategy
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import show_json, show_line
from .reset import parse_target


async def create_group(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    *,
    start: str,
    strategy: ConsumeStrategy,
) -> None:
    """Make a group that begins at `start`, and show its settings."""
    if start.startswith(PREFIX):
        begins = manifest_start(start, subject=subject)
        await change(
            meta,
            output,
            lambda admin: admin.create_group(
                subject,
                group,
                start=begins.at,
                at_ms=begins.at_ms,
                cursors=begins.cursors,
                consume_strategy=strategy,
            ),
        )
        return
    target, offset, at_ms = parse_target(start, now_ms=SystemClock.wall_ms())
    if offset is not None or target not in {ResetTo.EARLIEST, ResetTo.LATEST, ResetTo.TIME}:
        raise ConfigError("a group starts at earliest, latest or a time; an offset needs a reset")
    await change(
        meta,
        output,
        lambda admin: admin.create_group(
            subject, group, start=target.value, at_ms=at_ms, consume_strategy=strategy
        ),
    )


async def set_group(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    *,
    on_failure: FailurePolicy | None,
    on_full: FullPolicy | None,
    tries_max: int | None,
    backoff_first_ms: int | None,
    backoff_max_ms: int | None,
    forget: bool,
) -> None:
    """Change the stored policy of a group, and show its settings."""
    given = (on_failure, on_full, tries_max, backoff_first_ms, backoff_max_ms)
    if not forget and all(value is None for value in given):
        raise ConfigError(
            "say what to set: --on-failure, --on-full, --tries-max, the back-off, or --forget"
        )
    await change(
        meta,
        output,
        lambda admin: admin.set_group(
            subject,
            group,
            on_failure=on_failure,
            on_full=on_full,
            tries_max=tries_max,
            backoff_first_ms=backoff_first_ms,
            backoff_max_ms=backoff_max_ms,
            forget=forget,
        ),
    )


async def suspend_group(
    meta: str, output: OutputFormat, subject: str, group: str, *, client: str | None
) -> None:
    """Suspend a group, or a client of it, and say so if no consumer of that name has a
    partition.
    """
    before: GroupDescription | None = None

    async def call(admin: Admin) -> GroupSettings:
        nonlocal before
        before = None if client is None else await admin.describe_group(subject, group)
        return await admin.suspend_group(subject, group, client=client)

    await change(meta, output, call)
    if before is None or output is OutputFormat.JSON:
        return
    owners = {each.owner for each in before.partitions if each.owner is not None}
    known = before.settings.suspended_clients if before.settings is not None else ()
    if client not in owners and client not in known:
        names = ", ".join(sorted(owners)) or "none"
        show_line(
            f"no consumer of the name {client} had a partition (those that had: {names}); the "
            f"switch holds for one that comes"
        )


async def change(
    meta: str, output: OutputFormat, call: Callable[[Admin], Awaitable[GroupSettings]]
) -> None:
    """Change the settings of a group by a call of an admin client, and show them."""
    async with open_admin(meta) as admin:
        settings = await call(admin)
    if output is OutputFormat.JSON:
        show_json(settings)
        return
    for line in settings_lines(settings):
        show_line(line)


def settings_lines(settings: GroupSettings) -> list[str]:
    """What is stored of a group, for people."""
    policy = settings.policy
    stored = {
        "on failure": policy.on_failure,
        "when full": policy.on_full,
        "tries max": policy.tries_max,
        "back-off": None
        if policy.backoff_max_ms is None
        else f"{policy.backoff_first_ms} to {policy.backoff_max_ms} ms",
    }
    given = [f"{name} {value}" for name, value in stored.items() if value is not None]
    lines = [
        f"{settings.group} on {settings.subject}: {settings.strategy}, began at {settings.start}",
        f"stored policy: {', '.join(given) or 'none; each consumer uses its own settings'}",
    ]
    if settings.unstarted:
        ids = ", ".join(map(str, settings.unstarted))
        lines.append(f"its start is not stored yet by the brokers of partitions {ids}")
    if settings.suspended:
        lines.append("suspended by an operator")
    if settings.suspended_clients:
        lines.append(f"clients suspended by an operator: {', '.join(settings.suspended_clients)}")
    return lines
