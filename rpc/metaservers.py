"""Calls one of several metaservers, and fails over to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..protocol import endpoints
from ..protocol.access.capability import NO_CAPABILITY
from ..protocol.control import Health
from ..protocol.errors import (
    Fate,
    ForeignServerError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    RetryRule,
    StorageError,
    UnauthenticatedError,
)
from ..protocol.http.endpoint import Endpoint
from .liveness.control_calls import call_control
from .network import KnowsMetaservers, Network

T = TypeVar("T")
CALL_TIMEOUT_MS = 5_000


class Metaservers:
    """
    Calls one of several metaservers, starting with the one that answered last.

    An address moves to the end of the list if it cannot be reached, does not respond, has no
    database or belongs to another program. A failed call is retried at the next address, unless it
    is not idempotent and may have been executed. A call whose endpoint has `one_address` set is
    never retried.
    """

    def __init__(
        self, network: Network, addresses: Sequence[str], *, timeout_ms: int = CALL_TIMEOUT_MS
    ) -> None:
        assert addresses
        self._network = network
        self._addresses = list(addresses)
        if isinstance(network, KnowsMetaservers):
            network.add_metaservers(self._addresses)
        self._timeout_ms = timeout_ms

    def move_to_end(self, address: str) -> None:
        """Move an address to the end of the list, because its metaserver did not respond."""
        self._addresses.sort(
            key=lambda candidate: candidate == address
        )  # the others keep their order

    @property
    def address_count(self) -> int:
        """The number of metaservers."""
        return len(self._addresses)

    async def call(
        self,
        endpoint: Endpoint[T],
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        wait_ms: int | None = None,
        timeout_ms: int | None = None,
        **names: object,
    ) -> T:
        """
        Make one control call.

        Args:
            query: query parameters; None values are omitted.
            wait_ms: the time in milliseconds that the metaserver itself may wait; None uses the
                body's `wait_ms`, if it has one.
            timeout_ms: the timeout for each metaserver, in addition to `wait_ms`; None uses the
                timeout of the endpoint or, if it has none, of this client.
            names: values for the placeholders in the path.

        Raises:
            KeylaneError: the metaserver refused the call, or there was no answer.
        """
        # This is a copy, because each concurrent call tries every address, and any of them may
        # reorder the list.
        addresses = self._addresses[:1] if endpoint.one_address else list(self._addresses)
        error_to_raise: KeylaneError | None = None
        is_doubtful = False  # a metaserver may have done it without an answer
        if wait_ms is None:
            wait_ms = int(getattr(body, "wait_ms", 0))
        total_ms = (timeout_ms or endpoint.timeout_ms or self._timeout_ms) + wait_ms
        path, query_texts = endpoint.path_of(**names), endpoint.query_of(query)
        now_s = asyncio.get_running_loop().time
        for address in addresses:
            deadline_s = now_s() + total_ms / 1000
            try:
                return await call_control(
                    self._network,
                    endpoint,
                    address,
                    path,
                    body,
                    query_texts,
                    wait_ms=wait_ms,
                    timeout_ms=total_ms,
                )
            except (InvalidRequestError, UnauthenticatedError) as error:
                if not _may_be_other_program(error):
                    raise
                remaining_ms = int((deadline_s - now_s()) * 1000)
                other_program = await self._other_program(address, remaining_ms)
                if other_program is None:
                    raise
                self.move_to_end(address)
                error_to_raise = error_to_raise or other_program
            except (NotSentError, OutcomeUnknownError, ForeignServerError, StorageError) as error:
                self.move_to_end(address)
                if not (endpoint.repeatable or isinstance(error, NotSentError)):
                    raise
                is_doubtful |= not endpoint.is_get and error.fate is Fate.UNKNOWN
                # An error that a retry may resolve takes precedence over one that a retry cannot.
                if (
                    error_to_raise is None
                    or error_to_raise.retry is RetryRule.NEVER
                    or error.retry is not RetryRule.NEVER
                ):
                    error_to_raise = error
            except KeylaneError as error:
                if is_doubtful:
                    raise error.copy(Fate.UNKNOWN) from None
                raise
        assert error_to_raise is not None, "there is at least one address"
        raise error_to_raise.copy(Fate.UNKNOWN) if is_doubtful else error_to_raise

    async def _other_program(self, address: str, timeout_ms: int) -> InvalidRequestError | None:
        """Return an error if another keylane program is at `address`; None if it is a metaserver,
        or does not respond within `timeout_ms`.
        """
        call = endpoints.HEALTH
        try:
            health = await self._network.control(
                call.method, address, call.path, call.answer, timeout_ms=max(1, timeout_ms)
            )
            check_program("metaserver", address, health)
        except InvalidRequestError as error:
            return error if error.address else None
        except KeylaneError:
            pass
        return None


def _may_be_other_program(error: InvalidRequestError | UnauthenticatedError) -> bool:
    """
    Return True if this error may come from another kind of keylane program.

    A broker with access control expects a capability, and refuses a token before it notices that it
    does not know the call.
    """
    if isinstance(error, UnauthenticatedError):
        return error.problem == NO_CAPABILITY
    return bool(error.unknown_call)


def check_program(program: str, address: str, health: Health) -> Health:
    """Return `health` if it was reported by this kind of `program`. Raises InvalidRequestError."""
    if health.program == program:
        return health
    error = InvalidRequestError(
        f"{address} is the address of a {health.program}, not of a {program}",
        address=address,
        program=health.program,
    )
    metaservers = health.details.get("metaservers")
    if program == "metaserver" and isinstance(metaservers, list) and metaservers:
        error.hint = f"Give the address of its metaserver: {', '.join(map(str, metaservers))}"
    elif program == "broker":
        error.hint = "`keylane broker list` shows the addresses of brokers."
    raise error
