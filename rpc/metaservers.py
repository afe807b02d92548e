"""Chooses which of several metaservers to ask, and what to do when a call fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..protocol import endpoints
from ..protocol.access.capability import NO_CAPABILITY
from ..protocol.control import Health
from ..protocol.errors import (
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
from .liveness.asking_again import ControlCaller
from .network import KnowsMetaservers, Network

T = TypeVar("T")
CALL_TIMEOUT_MS = 5_000


class Metaservers:
    """
    Calls one of several metaservers, beginning with the one that answered last.

    A metaserver that cannot be reached, does not answer, has no database or is another program, of
    keylane or not, is asked last from then on. A failed call is made at the next address, unless
    it may have been done and is not idempotent: then it raises. A call whose endpoint has
    `one_address` asks one address.
    """

    def __init__(
        self, network: Network, addresses: Sequence[str], *, timeout_ms: int = CALL_TIMEOUT_MS
    ) -> None:
        assert addresses
        self._network = network
        self._addresses = list(addresses)
        if isinstance(network, KnowsMetaservers):
            network.know_metaservers(self._addresses)
        self._timeout_ms = timeout_ms
        self._control = ControlCaller(network)

    def put_last(self, address: str) -> None:
        """Ask the metaserver at `address` last from now on, because it has not answered."""
        self._addresses.sort(key=lambda known: known == address)  # the others keep their order

    @property
    def address_count(self) -> int:
        """Number of metaservers."""
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
            query: query parameters; those that are None are omitted.
            wait_ms: milliseconds for which the metaserver itself may wait; None: `wait_ms` of the
                body, if it has one.
            timeout_ms: time for each metaserver, beyond `wait_ms`; None: the endpoint's timeout,
                else this client's.
            names: values for the names in braces in the path.

        Raises:
            KeylaneError: the metaserver's refusal, or the reason why none has answered.
        """
        # A copy: concurrent calls each try every address, while any of them reorders the list.
        addresses = self._addresses[:1] if endpoint.one_address else list(self._addresses)
        raised: KeylaneError | None = None
        if wait_ms is None:
            wait_ms = int(getattr(body, "wait_ms", 0))
        time_ms = (timeout_ms or endpoint.timeout_ms or self._timeout_ms) + wait_ms
        path, texts = endpoint.path_of(**names), endpoint.query_of(query)
        now_s = asyncio.get_running_loop().time
        for address in addresses:
            until_s = now_s() + time_ms / 1000
            try:
                return await self._control.ask(
                    endpoint, address, path, body, texts, wait_ms=wait_ms, timeout_ms=time_ms
                )
            except (InvalidRequestError, UnauthenticatedError) as error:
                left_ms = int((until_s - now_s()) * 1000)
                other = await self._other_program(address, left_ms) if _of_another(error) else None
                if other is None:
                    raise
                self.put_last(address)
                raised = raised or other
            except (NotSentError, OutcomeUnknownError, ForeignServerError, StorageError) as error:
                self.put_last(address)
                again = endpoint.repeatable or isinstance(error, NotSentError)
                if not again:
                    raise
                # An error that may pass is raised rather than one that never will.
                if (
                    raised is None
                    or raised.retry is RetryRule.NEVER
                    or error.retry is not RetryRule.NEVER
                ):
                    raised = error
        assert raised is not None, "there is at least one address"
        raise raised

    async def _other_program(self, address: str, timeout_ms: int) -> InvalidRequestError | None:
        """Return the error if another program of keylane is at `address`; None: a metaserver, or no
        answer within `timeout_ms`.
        """
        call = endpoints.HEALTH
        try:
            health = await self._network.control(
                call.method, address, call.path, call.answer, timeout_ms=max(1, timeout_ms)
            )
            of_program("metaserver", address, health)
        except InvalidRequestError as error:
            return error if error.address else None
        except KeylaneError:
            pass
        return None


def _of_another(error: InvalidRequestError | UnauthenticatedError) -> bool:
    """
    Return whether another program of keylane may have answered.

    A broker with access control expects capabilities, and refuses a token before it looks up the
    call.
    """
    if isinstance(error, UnauthenticatedError):
        return error.problem == NO_CAPABILITY
    return bool(error.unknown_call)


def of_program(program: str, address: str, health: Health) -> Health:
    """Return `health` if it is that of a `program`. Raises InvalidRequestError."""
    if health.program != program:
        raise InvalidRequestError(
            f"{address} is the address of a {health.program}, not of a {program}",
            address=address,
            program=health.program,
        )
    return health
