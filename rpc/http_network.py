"""The real network: aiohttp sessions for control calls and data-plane connections.

An address is `host:port`; with a certificate authority every connection uses TLS. A network with
an identity shows it to servers (`access.client_credentials`). Pools, redirects and proxies are
aiohttp's; the data plane uses none of them.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec

from ..protocol.address import check_real
from ..protocol.control import ErrorBody
from ..protocol.endpoints import CAPABILITY, DATA_PATH, HEALTH
from ..protocol.errors import (
    CapabilityEndedError,
    ClosedError,
    Fate,
    ForeignServerError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    MissingExtraError,
    NotSentError,
    OutcomeUnknownError,
    Reason,
    UnauthenticatedError,
)
from ..protocol.frames import (
    Challenge,
    Challenged,
)
from ..protocol.http.access import AskCapability, Capabilities
from ..protocol.http.bodies import encode_json
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX
from ..protocol.membership.versions import VERSION, VERSION_HEADER, check_server
from ..protocol.text import plain_number
from .access.credentials import (
    Credentials,
    ShownCapability,
    authenticate,
    greet,
    keep_authenticated,
)
from .access.throttling import THROTTLED_HEADER, Throttling
from .access.token_file import TokenSource, refused_token, token_source
from .channel import DataChannel
from .frames.frame_socket import open_socket
from .liveness.recent import RecentNames
from .liveness.silence import SilencePatience, watched_socket
from .network import no_answer
from .race import start_task
from .reasons import cause, reason
from .threads.host_names import HostNames
from .tls.contexts import ClientContexts
from .tls.handshakes import is_cut, tls_problem, why_ended
from .tls.settings import tls_of_environment

T = TypeVar("T")
REUSED_SECONDS = 4.0
"""Seconds after which an idle connection of control calls is not used again, because a proxy may
have forgotten it.
"""
ALIVE_SECONDS = 3.0
"""Seconds to wait on a new connection for a broker that is silent on another one."""
CONNECT_SECONDS = 3.0
"""Seconds within which a running machine accepts a connection, even if the first packet is lost."""
TLS_END_SECONDS = 0.02
"""Seconds to wait after closing TLS connections, which end some turns of the event loop later;
aiohttp does not wait for that.
"""
CAPABILITY_TIMEOUT_MS = 3_000
UNAUTHENTICATED, DENIED = 401, 403
"""HTTP statuses of refusals."""
ADDRESSES_KNOWN_MAX = 10_000
"""Number of addresses for which it is known whether they have answered: more than the servers of a
cluster, which may return at other addresses.
"""
_NO_CONNECTION = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
    UnicodeError,
)


class HttpNetwork:
    """
    See `network.Network` for the contract. Make it inside a running event loop.

    Args:
        tls: TLS settings; None: connections do not use TLS.
        token: the client's token; None: the one that the environment names, if any.
        identity: credentials that a server shows instead of a token.
        by_certificate: without a token, metaservers may identify the client by its certificate.
        ask_environment: False: without `token` there is none, whatever the environment names.
        follows_files: replaced files of `tls` are used for later connections, without `renew`.

    Raises:
        ConfigError: a file of `tls` cannot be used.
        ConfigError
    """

    def __init__(
        self,
        tls: TlsSettings | None = None,
        *,
        token: str | TokenSource | None = None,
        identity: Credentials | None = None,
        by_certificate: bool = False,
        follows_files: bool = False,
    ) -> None:
        self._scheme = "http" if tls is None else "https"
        self._contexts = None if tls is None else ClientContexts(tls, follows_files=follows_files)
        source = token if callable(token) else token_source(token)
        if identity is None and (source is not None or by_certificate):
            try:
                from .access.client_credentials import ClientCredentials
            except ModuleNotFoundError as error:
                part = "a client of a cluster with access control"
                raise MissingExtraError.of(error, part, "access") from error
            identity = ClientCredentials(source, self._ask_capabilities)
        self._identity = identity
        self._token_source = source
        self._renewing: set[asyncio.Task[None]] = set()
        self._session = _session(keepalive_timeout=REUSED_SECONDS)
        self._new: aiohttp.ClientSession | None = None
        """Session that only makes new connections; made when it is needed."""
        self._patience = SilencePatience()
        self.throttling = Throttling()
        self._answered = RecentNames(ADDRESSES_KNOWN_MAX)
        """Addresses that have answered: a call to one of them may have been done even if no answer
        arrived.
        """
        self._cut = RecentNames(ADDRESSES_KNOWN_MAX)
        """Addresses that have ended a connection since their last answer."""

    def know_metaservers(self, addresses: Sequence[str]) -> None:
        """Show the token itself to these metaservers; see `network.KnowsMetaservers`."""
        if self._identity is not None:
            self._identity.know_metaservers(addresses)

    async def open_channel(self, address: str, *, timeout_ms: int) -> DataChannel:
        """
        Return a channel to the broker at `address`, on which the caller is authenticated.

        Raises:
            NotSentError
            VersionError: client and broker are more than one minor version
                apart.
            UnauthenticatedError, ConfigError: the token is refused, or cannot be read.
        """
        if self._identity is None:
            return await self._connect(address, timeout_ms)
        held = await self._identity.held()
        channel = await self._connect(address, timeout_ms)
        if held is None:
            return channel
        try:
            await self._introduce(self._identity, channel, held, address, timeout_ms)
        except OutcomeUnknownError as error:
            await channel.close()
            raise NotSentError(error.message, address=address) from error
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _introduce(
        self,
        identity: Credentials,
        channel: DataChannel,
        held: ShownCapability,
        address: str,
        timeout_ms: int,
    ) -> None:
        """Authenticate the caller, with a newer capability if the first is refused, and again
        before it ends.
        """
        challenged, _ = await channel.call(Challenge(), timeout_ms=timeout_ms)
        assert isinstance(challenged, Challenged)
        nonce = challenged.nonce
        if not nonce:
            return
        try:
            await authenticate(channel, held, nonce, address, timeout_ms)
        except CapabilityEndedError:
            identity.refused(held.text)
            newer = await identity.held()
            if newer is None:
                raise
            held = newer
            await authenticate(channel, held, nonce, address, timeout_ms)
        task = start_task(keep_authenticated(identity, channel, held, nonce, address, timeout_ms))
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _ask_capabilities(
        self, address: str, token: str | None, holder: bytes
    ) -> Capabilities:
        try:
            return await self._control(
                self._new_session(),
                CAPABILITY.method,
                address,
                CAPABILITY.path,
                Capabilities,
                body=AskCapability(holder=holder),
                query=None,
                timeout_ms=CAPABILITY_TIMEOUT_MS,
                bearer=token,
            )
        except UnauthenticatedError as error:
            raise refused_token(error, self._token_source) from error

    def _check_open(self) -> None:
        """Raise ClosedError if a task of the client continues while another one closes it."""
        if self._session.closed:
            raise ClosedError("its connections are closed")

    async def _connect(self, address: str, timeout_ms: int) -> DataChannel:
        check_real(address)
        self._check_open()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                socket = await open_socket(
                    self._new_session(),
                    f"{self._scheme}://{address}{DATA_PATH}",
                    tls=self._tls_of(address),
                    bytes_max=FRAME_BYTES_MAX,
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if (problem := await self._tls_problem(address, error)) is not None:
                raise problem from cause(error)
            raise NotSentError(
                f"cannot reach the broker at {address}: {reason(error)}",
                address=address,
            ) from cause(error)
        self._note_answer(address)
        channel = DataChannel(
            socket, address, lambda told: self.throttling.note(address, told.wait_ms, told.limit)
        )
        try:
            await greet(channel, timeout_ms)
        except OutcomeUnknownError as error:
            await channel.close()
            raise NotSentError(error.message, address=address) from error
        except BaseException:
            await channel.close()
            raise
        channel.judge_silence(partial(self._answers, address), self._patience)
        return channel

    def _new_session(self) -> aiohttp.ClientSession:
        self._check_open()
        if self._new is None:
            self._new = _session(force_close=True)
        return self._new

    async def _answers(self, address: str) -> bool:
        """Return whether a keylane server answers on a new connection, whatever the answer is; the
        answer of a proxy before it does not count.
        """
        try:
            async with self._new_session().get(
                f"{self._scheme}://{address}{HEALTH.path}",
                allow_redirects=False,
                ssl=self._tls_of(address),
                timeout=_limits(int(ALIVE_SECONDS * 1000)),
            ) as response:
                return VERSION_HEADER in response.headers
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeylaneError):
            return False

    async def control(
        self,
        method: str,
        address: str,
        path: str,
        answer: type[T],
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_ms: int,
        anew: bool = False,
    ) -> T:
        """See `network.Network.control`; a body over the limit raises MessageTooLargeError, a
        virtual server StoryError.
        """
        check_real(address)
        identity = self._identity
        call = partial(
            self._control,
            self._new_session() if anew else self._session,
            method,
            address,
            path,
            answer,
            body=body,
            query=query,
            timeout_ms=timeout_ms,
        )
        if identity is None:
            return await call()
        bearer = await identity.bearer(address)
        try:
            return await call(bearer=bearer)
        except UnauthenticatedError as error:
            raise refused_token(error, self._token_source) from error
        except CapabilityEndedError:
            if bearer is None or not identity.refused(bearer):
                raise
            return await call(bearer=await identity.bearer(address))

    async def _control(
        self,
        session: aiohttp.ClientSession,
        method: str,
        address: str,
        path: str,
        answer: type[T],
        *,
        body: object,
        query: Mapping[str, str] | None,
        timeout_ms: int,
        bearer: str | None = None,
    ) -> T:
        self._check_open()
        packed = _packed(f"{method} {path}", body, query)
        try:
            async with session.request(
                method,
                f"{self._scheme}://{address}{path}",
                data=packed or None,
                params=query,
                headers=_headers(bearer),
                allow_redirects=False,
                ssl=self._tls_of(address),
                timeout=_limits(timeout_ms),
            ) as response:
                data = await response.read()
                status = response.status
                waited_ms = plain_number(response.headers.get(THROTTLED_HEADER, ""))
                if waited_ms is not None and waited_ms < 10_000_000:
                    self.throttling.note(address, waited_ms, "requests")
                version = response.headers.get(VERSION_HEADER)
                self._note_answer(address)
        except _NO_CONNECTION as error:
            raise self._told(tls_problem(address, error)) or NotSentError(
                f"cannot reach {address}: {reason(error)}", address=address
            ) from cause(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise await self._no_answer(address, method, path, error) from cause(error)
        if status == 200:  # a refusal says more
            _check_answerer(version, method)
        try:
            if status == 200:
                return msgspec.json.decode(data, type=answer)
            refusal = msgspec.json.decode(data, type=ErrorBody)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ForeignServerError(
                f"{address} answered {method} {path} with status {status}, and not as a keylane "
                f"server: {error}",
                address=address,
            ) from error
        raise refusal.error()

    async def _no_answer(
        self, address: str, method: str, path: str, error: Exception
    ) -> NotSentError | OutcomeUnknownError | ForeignServerError:
        """Return the error of a call whose connection failed, or whose answer is not HTTP."""
        answered = address in self._answered and method != aiohttp.hdrs.METH_GET
        problem = await self._tls_problem(address, error)
        # An alert of TLS says that nothing was done, a look afterwards does not: an older
        # connection may have been used.
        if problem is not None and (not answered or tls_problem(address, error) is not None):
            return problem
        if problem is None and isinstance(error, aiohttp.ClientResponseError):
            return _no_http(address, method, path)
        why = reason(error) if problem is None else problem.message
        return no_answer(method, path, f"no answer from {address} to {method} {path}: {why}")

    async def text(
        self, address: str, path: str, *, timeout_ms: int, statuses: Container[int] = (200,)
    ) -> tuple[str, str]:
        """
        GET a text, such as a server's metrics; credentials are shown only if the server asks for
        them.

        Returns:
            The text, and the answer's Date header: the server's clock in whole seconds.

        Raises:
            NotSentError, OutcomeUnknownError, ForeignServerError: same reasons as for `control`, or
                the status is not in `statuses`.
            UnauthenticatedError, AccessDeniedError: the server does not show it to this caller.
        """
        text, date, status = await self._text(address, path, timeout_ms, None)
        if status == UNAUTHENTICATED and self._identity is not None:
            bearer = await self._identity.bearer(address)
            text, date, status = await self._text(address, path, timeout_ms, bearer)
        if status in statuses:
            self._note_answer(address)
            return text, date
        if status in (UNAUTHENTICATED, DENIED):
            try:
                refusal = msgspec.json.decode(text, type=ErrorBody)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass  # of a proxy
            else:
                raise refusal.error()
        raise ForeignServerError(
            f"{address} answered GET {path} with status {status}", address=address
        )

    async def _text(
        self, address: str, path: str, timeout_ms: int, bearer: str | None
    ) -> tuple[str, str, int]:
        """Return the text, the Date header and the status. Raises NotSentError,
        ForeignServerError.
        """
        check_real(address)
        try:
            async with self._session.get(
                f"{self._scheme}://{address}{path}",
                headers={} if bearer is None else _headers(bearer),
                allow_redirects=False,
                timeout=_limits(timeout_ms),
                ssl=self._tls_of(address),
            ) as response:
                return await response.text(), response.headers.get("Date", ""), response.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            problem: KeylaneError | None = await self._tls_problem(address, error)
            if problem is None and isinstance(error, aiohttp.ClientResponseError):
                problem = _no_http(address, aiohttp.hdrs.METH_GET, path)
            raise problem or NotSentError(
                f"cannot reach {address}: {reason(error)}", address=address
            ) from cause(error)

    def renew(self, tls: TlsSettings) -> None:
        """Read the TLS files again for later connections. Raises ConfigError; then the old ones
        stay in use.
        """
        if self._contexts is not None:
            self._contexts.renew(tls)

    def _tls_of(self, address: str) -> ssl.SSLContext | bool:
        """Return the value that aiohttp takes as `ssl` of a connection."""
        return True if self._contexts is None else self._contexts.of(address)

    def _note_answer(self, address: str) -> None:
        self._answered.add(address)
        self._cut.discard(address)

    async def _tls_problem(self, address: str, error: Exception) -> NotSentError | None:
        """Return the TLS problem that explains a failed connection, None if there is none."""
        problem = tls_problem(address, error)
        if problem is None and is_cut(error) and self._asks_why(address):
            context = None if self._contexts is None else self._contexts.of(address)
            problem = await why_ended(address, error, context)
        return self._told(problem)

    def _asks_why(self, address: str) -> bool:
        """
        Return whether to ask the address why it has ended a connection, which takes up to a second.

        An address that has answered is not asked the first time, because most such ends come from a
        server that is being stopped.
        """
        if address not in self._answered:
            return True
        if self._contexts is None:
            return False
        again = address in self._cut
        self._cut.add(address)
        return again or bool(self._contexts.own_certificate_problem())

    def _told(self, problem: NotSentError | None) -> NotSentError | None:
        """Return the problem, or what is wrong with this client's own certificate if that is
        refused.
        """
        refused = problem is not None and problem.reason is Reason.CLIENT_CERTIFICATE
        if problem is None or self._contexts is None or not refused:
            return problem
        own = self._contexts.own_certificate_problem()
        if not self._contexts.shows_certificate:
            own = "it wants a certificate, and this client has none"
        if not own:
            return problem
        return NotSentError(
            Reason.CLIENT_CERTIFICATE,
            f"the server at {problem.address} refuses this client: {own}",
            address=problem.address,
        )

    async def close(self) -> None:
        """Close the session, and with it every connection."""
        for task in list(self._renewing):
            task.cancel()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        if self._identity is not None:
            await self._identity.close()
        await self._session.close()
        if self._new is not None:
            await self._new.close()
        if self._contexts is not None:
            await asyncio.sleep(TLS_END_SECONDS)


def client_network(
    tls: TlsSettings | None = None, token: str | TokenSource | None = None
) -> HttpNetwork:
    """
    Return the network of a client, made from the arguments, or else from what the environment
    names: KEYLANE_TLS_CA, KEYLANE_TOKEN_FILE.

    Raises:
        ConfigError: a file cannot be used.
        ConfigError
    """
    chosen = tls or tls_of_environment()
    return HttpNetwork(
        chosen, token=token, by_certificate=bool(chosen and chosen.cert), follows_files=True
    )


def _session(**connections: Any) -> aiohttp.ClientSession:
    """Return a session whose connector has these arguments besides those of all sessions."""
    connector = aiohttp.TCPConnector(
        limit=0, resolver=HostNames(), socket_factory=watched_socket, **connections
    )
    return aiohttp.ClientSession(connector=connector, trust_env=False)


def _limits(timeout_ms: int) -> aiohttp.ClientTimeout:
    """Return the timeouts of a call; aiohttp would round those above 5 s up to a whole second, for
    which leases leave no time.
    """
    return aiohttp.ClientTimeout(
        total=timeout_ms / 1000, sock_connect=CONNECT_SECONDS, ceil_threshold=math.inf
    )


def _packed(call: str, body: object, query: Mapping[str, str] | None) -> bytes:
    """Return the bytes of a body. Raises InvalidRequestError for a text with a lone surrogate;
    MessageTooLargeError.
    """
    try:
        packed = b"" if body is None else encode_json(body)
        "".join((query or {}).values()).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{call}: not valid text: {error}") from None
    if len(packed) > CONTROL_BYTES_MAX:
        raise MessageTooLargeError(
            f"{call}: a body of {len(packed)} bytes, at most {CONTROL_BYTES_MAX}",
            size_bytes=len(packed),
            limit_bytes=CONTROL_BYTES_MAX,
        )
    return packed


def _headers(bearer: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json", VERSION_HEADER: VERSION}
    return headers if bearer is None else headers | {"authorization": f"Bearer {bearer}"}


def _check_answerer(version: str | None, method: str) -> None:
    """
    Check the version of a server that has answered a call; the answer of a proxy has none.

    Raises:
        VersionError: with fate UNKNOWN if the call may have changed
            something.
    """
    if version is None:
        return
    try:
        check_server(version, VERSION)
    except KeylaneError as error:
        if method == aiohttp.hdrs.METH_GET:
            raise
        raise error.copy(Fate.UNKNOWN) from None


def _no_http(address: str, method: str, path: str) -> ForeignServerError:
    """Return the error for an answer that is not HTTP, for example from a mail or SSH server."""
    return ForeignServerError(f"{address} answered {method} {path} not in HTTP", address=address)
