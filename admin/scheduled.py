"""An admin's calls about scheduled messages: which wait at which broker, and their cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from ..protocol.address import addresses_of
from ..protocol.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidRequestError,
    KeylaneError,
    ScheduledUnknownError,
    UnauthenticatedError,
)
from ..protocol.ids import check_name
from ..protocol.limits import SCHEDULED_LISTED_MAX
from ..protocol.scheduled.receipt import CancelOutcome, ScheduledPage, ScheduledView
from ..protocol.settings import is_within
from .calls import ClusterCalls


class ScheduledMessages(Struct, frozen=True, kw_only=True):
    """Messages that brokers keep for a later delivery."""

    count: int
    """All of them, at the brokers that answered."""
    messages: list[ScheduledView]
    """Those that are delivered next, by their times."""
    problems: dict[str, str]
    """Broker group, or address → why it was not asked, or did not answer."""


class ScheduledCalls(ClusterCalls):
    """The calls of an admin about scheduled messages."""

    async def list_scheduled(
        self, *, subject: str | None = None, broker: str | None = None, limit: int = 100
    ) -> ScheduledMessages:
        """
        The messages that are delivered next, of all subjects or one.  A broker that does not answer is no error.

        Args:
            broker: the address of the only broker to ask; then no metaserver is asked.  None: all that are available.
            limit: at most this many messages, up to 1,000.

        Raises:
            InvalidRequestError: `limit` is no such number.
            ConfigError: `broker` is not one address.
            AccessDeniedError, UnauthenticatedError: the caller may not see them.
        """
        if subject is not None:
            check_name("subject", subject)
        if not is_within(limit, 1, SCHEDULED_LISTED_MAX):
            raise InvalidRequestError(f"limit is 1 to {SCHEDULED_LISTED_MAX}, not {limit!r:.40}")
        addresses, problems = await self._brokers_to_ask(broker)

        async def ask(address: str) -> ScheduledPage | KeylaneError:
            try:
                client = self._connections.broker_at(address)
                return await client.scheduled(subject=subject, limit=limit)
            except (AccessDeniedError, UnauthenticatedError, ConfigError):
                raise  # every broker says the same, and 0 messages would be no answer
            except KeylaneError as error:
                return error

        pages = []
        answers = await asyncio.gather(*map(ask, addresses))
        for address, answer in zip(addresses, answers, strict=True):
            if isinstance(answer, ScheduledPage):
                pages.append(answer)
            else:
                problems[address] = answer.message
        messages = [message for page in pages for message in page.messages]
        return ScheduledMessages(
            count=sum(page.count for page in pages),
            messages=sorted(messages, key=lambda message: message.deliver_at_ms)[:limit],
            problems=problems,
        )

    async def cancel_scheduled(
        self, scheduled_id: str, *, broker: str | None = None
    ) -> CancelOutcome:
        """
        Have a scheduled message never delivered, durably.  A repeat is harmless.

        Args:
            scheduled_id: as its receipt has it: 32 hexadecimal digits.
            broker: as of `list_scheduled`.

        Raises:
            InvalidRequestError: not an id.
            ScheduledUnknownError: no broker that was asked knows the message, or no longer.
            ScheduledTakenError: it is on its way to its subject, which does not answer; ask again.
            ConfigError: `broker` is not one address.
            KeylaneError: what else the last broker answered, if none knows the message.
        """
        if not isinstance(scheduled_id, str) or not _is_id(scheduled_id):
            raise InvalidRequestError(
                f"the id of a scheduled message has 32 hexadecimal digits, not {scheduled_id!r:.80}"
            )
        addresses, problems = await self._brokers_to_ask(broker)
        failure: KeylaneError | None = None
        for address in addresses:
            try:
                client = self._connections.broker_at(address)
                return (await client.cancel_scheduled(scheduled_id)).outcome
            except ScheduledUnknownError:
                continue
            except KeylaneError as error:
                failure = error
        if failure is not None:
            raise failure
        text = f"no broker that was asked knows scheduled message {scheduled_id}"
        if problems:
            text += f"; not asked: {', '.join(problems)}"
        raise ScheduledUnknownError(text, scheduled_id=scheduled_id)

    async def _brokers_to_ask(self, broker: str | None) -> tuple[Sequence[str], dict[str, str]]:
        """The addresses of the brokers to ask, and why others are not."""
        if broker is not None:
            self._connections.home.check()
            addresses = addresses_of(broker)
            if len(addresses) > 1:
                raise ConfigError(f"one broker is asked, not {broker!r:.80}")
            return addresses, {}
        brokers = (await self._meta.health()).details.get("brokers", [])
        silent = {
            each["broker_group"]: "the broker is silent"
            for each in brokers
            if not each["available"]
        }
        return [each["address"] for each in brokers if each["available"]], silent


def _is_id(text: str) -> bool:
    try:
        return len(text) == 32 and len(bytes.fromhex(text)) == 16
    except ValueError:
        return False
