"""The real network, which uses aiohttp sessions for control calls and data-plane connections.

An address is `host:port`. With a certificate authority, every connection uses TLS. A network with
credentials sends them to servers (`access.client_credentials`). aiohttp pools the connections for
control calls. Redirects and proxies are not used.
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

from ..protocol.address import META_DEFAULT, refuse_virtual_address
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
from ..protocol.membership.versions import (
    REQUEST_ID_HEADER,
    VERSION,
    VERSION_HEADER,
    check_server,
)
from ..protocol.text import parse_number
from .access.credentials import (
    CapabilityCredential,
    Credentials,
    authenticate,
    exchange_versions,
    keep_authenticated,
)
from .access.throttling import THROTTLED_HEADER, Throttling
from .access.token_file import TokenSource, refused_token_error, token_source
from .channel import DataChannel
from .frames.upgrade import open_socket
from .liveness.recent import RecentNames
from .liveness.silence import SilenceTimeouts, watched_socket
from .network import no_answer
from .race import start_task
from .reasons import cause, reason
from .threads.host_names import HostNames
from .tls.contexts import ClientContexts
from .tls.handshakes import is_disconnect, probe_tls, tls_problem
from .tls.settings import tls_of_environment
from .unclosed import watch_network

T = TypeVar("T")
REUSED_SECONDS = 4.0
"""The time in seconds after which an idle connection is not reused for control calls, because a
proxy may have dropped it.
"""
ALIVE_SECONDS = 3.0
"""The timeout in seconds of the probe on a new connection when a broker is silent on another
one.
"""
CONNECT_SECONDS = 3.0
"""The time in seconds in which a running machine accepts a connection, even if the first packet is
lost.
"""
TLS_END_SECONDS = 0.02
"""The time in seconds to wait for TLS connections to close, which takes some iterations of the
event loop; aiohttp does not wait for them.
"""
CAPABILITY_TIMEOUT_MS = 3_000
UNAUTHENTICATED, DENIED = 401, 403
"""HTTP statuses of access control."""
ADDRESSES_KNOWN_MAX = 10_000
"""The maximum number of addresses that are remembered. It exceeds the number of servers in a
cluster, because servers may come back at other addresses.
"""
_NO_CONNECTION = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
    UnicodeError,
)


class HttpNetwork:
    """
    The network over aiohttp; see `network.Network` for the contract. Create it inside a running
    event loop.

    Args:
        tls: TLS settings; None for connections without TLS.
        token: the client's token; None uses that of the environment, if any.
        identity: the credentials that a server program sends instead of a token.
        by_certificate: True if metaservers may identify a client that has no token by its
            certificate.
        follows_files: True if later connections use replaced files of `tls` without a call to
            `renew`.
        owner: the client that uses the network, for the warning that it was not closed.

    Raises:
        ConfigError: a file of `tls` or the token cannot be used.
        MissingExtraError: the extra for access control is not installed.
    """

    def __init__(
        self,
        tls: TlsSettings | None = None,
        *,
        token: str | TokenSource | None = None,
        identity: Credentials | None = None,
        by_certificate: bool = False,
        follows_files: bool = False,
        owner: str = "",
    ) -> None:
        self._scheme = "http" if tls is None else "https"
        self._tls_contexts = (
            None if tls is None else ClientContexts(tls, follows_files=follows_files)
        )
        source = token if callable(token) else token_source(token)
        if identity is None and (source is not None or by_certificate):
            try:
                from .access.client_credentials import ClientCredentials
            except ModuleNotFoundError as error:
                part = "a client of a cluster with access control"
                raise MissingExtraError.of(error, part, "access") from error
            identity = ClientCredentials(source, self._request_capabilities)
        self._credentials = identity
        self._token_source = source
        self._renewal_tasks: set[asyncio.Task[None]] = set()
        self._session = _create_session(keepalive_timeout=REUSED_SECONDS)
        self._unpooled_session: aiohttp.ClientSession | None = None
        """The session that uses a new connection for each request. Created when needed."""
        self._sessions = [self._session]
        self._unclosed = watch_network(self, self._sessions, owner) if owner else None
        self._silence_timeouts = SilenceTimeouts()
        self.throttling = Throttling()
        self._answering_addresses = RecentNames(ADDRESSES_KNOWN_MAX)
        """Addresses that have answered before. A call to one of them may have been executed even if
        no answer arrives.
        """
        self._disconnected_addresses = RecentNames(ADDRESSES_KNOWN_MAX)
        """Addresses that have closed a connection since they last answered."""

    def add_metaservers(self, addresses: Sequence[str]) -> None:
        """Allow the token itself to be sent to these metaservers; see
        `network.KnowsMetaservers`.
        """
        if self._credentials is not None:
            self._credentials.add_metaservers(addresses)

    async def open_channel(self, address: str, *, timeout_ms: int) -> DataChannel:
        """
        Return an authenticated channel to the broker at `address`.

        Raises:
            NotSentError: the broker cannot be reached.
            VersionError: the client and the broker are more than one minor version apart.
            UnauthenticatedError: the token was refused.
            ConfigError: the token cannot be read.
        """
        if self._credentials is None:
            return await self._connect(address, timeout_ms)
        capability = await self._credentials.data_capability()
        channel = await self._connect(address, timeout_ms)
        if capability is None:
            return channel
        try:
            await self._authenticate(self._credentials, channel, capability, address, timeout_ms)
        except OutcomeUnknownError as error:
            await channel.close()
            raise NotSentError(error.message, address=address) from error
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _authenticate(
        self,
        identity: Credentials,
        channel: DataChannel,
        capability: CapabilityCredential,
        address: str,
        timeout_ms: int,
    ) -> None:
        """Authenticate the client on a channel, with a newer capability if the first one is
        refused. Start the task that reauthenticates before the capability expires.
        """
        challenged, _ = await channel.call(Challenge(), timeout_ms=timeout_ms)
        assert isinstance(challenged, Challenged)
        nonce = challenged.nonce
        if not nonce:
            return
        try:
            await authenticate(channel, capability, nonce, address, timeout_ms)
        except CapabilityEndedError:
            identity.mark_refused(capability.text)
            newer = await identity.data_capability()
            if newer is None:
                raise
            capability = newer
            await authenticate(channel, capability, nonce, address, timeout_ms)
        task = start_task(
            keep_authenticated(identity, channel, capability, nonce, address, timeout_ms)
        )
        self._renewal_tasks.add(task)
        task.add_done_callback(self._renewal_tasks.discard)

    async def _request_capabilities(
        self, address: str, token: str | None, holder: bytes
    ) -> Capabilities:
        try:
            return await self._request_control(
                self._get_unpooled_session(),
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
            raise refused_token_error(error, self._token_source) from error

    def _check_open(self) -> None:
        """Raise ClosedError if the network has been closed, for example by another task of the
        client.
        """
        if self._session.closed:
            raise ClosedError("its connections are closed")

    async def _connect(self, address: str, timeout_ms: int) -> DataChannel:
        refuse_virtual_address(address)
        self._check_open()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                socket = await open_socket(
                    self._get_unpooled_session(),
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
        self._record_response(address)
        channel = DataChannel(
            socket,
            address,
            lambda throttled: self.throttling.record(address, throttled.wait_ms, throttled.limit),
        )
        try:
            await exchange_versions(channel, timeout_ms)
        except OutcomeUnknownError as error:
            await channel.close()
            raise NotSentError(error.message, address=address) from error
        except BaseException:
            await channel.close()
            raise
        channel.watch_silence(partial(self._is_answering, address), self._silence_timeouts)
        return channel

    def _get_unpooled_session(self) -> aiohttp.ClientSession:
        self._check_open()
        if self._unpooled_session is None:
            self._unpooled_session = _create_session(force_close=True)
            self._sessions.append(self._unpooled_session)
        return self._unpooled_session

    async def _is_answering(self, address: str) -> bool:
        """Return True if a keylane server responds on a new connection, with any status. An answer
        from a proxy does not count.
        """
        try:
            async with self._get_unpooled_session().get(
                f"{self._scheme}://{address}{HEALTH.path}",
                allow_redirects=False,
                ssl=self._tls_of(address),
                timeout=_client_timeout(int(ALIVE_SECONDS * 1000)),
            ) as response:
                return VERSION_HEADER in response.headers
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeylaneError):
            return False

    async def is_accepting(self, address: str, *, timeout_ms: int) -> bool:
        """See `network.Network.is_accepting`."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, ValueError, TimeoutError):
            return False
        writer.close()
        return True

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
        new_connection: bool = False,
    ) -> T:
        """See `network.Network.control`. Also raises MessageTooLargeError for a body over the
        limit, and StoryError for the address of a server in a virtual cluster.
        """
        refuse_virtual_address(address)
        identity = self._credentials
        call = partial(
            self._request_control,
            self._get_unpooled_session() if new_connection else self._session,
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
            raise refused_token_error(error, self._token_source) from error
        except CapabilityEndedError:
            if bearer is None or not identity.mark_refused(bearer):
                raise
            return await call(bearer=await identity.bearer(address))

    async def _request_control(
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
        encoded = _encode_body(f"{method} {path}", body, query)
        try:
            async with session.request(
                method,
                f"{self._scheme}://{address}{path}",
                data=encoded or None,
                params=query,
                headers=_request_headers(bearer),
                allow_redirects=False,
                ssl=self._tls_of(address),
                timeout=_client_timeout(timeout_ms),
            ) as response:
                data = await response.read()
                status = response.status
                waited_ms = parse_number(response.headers.get(THROTTLED_HEADER, ""))
                if waited_ms is not None and waited_ms < 10_000_000:
                    self.throttling.record(address, waited_ms, "requests")
                version = response.headers.get(VERSION_HEADER)
                request_id = response.headers.get(REQUEST_ID_HEADER)
                self._record_response(address)
        except _NO_CONNECTION as error:
            not_sent = NotSentError(f"cannot reach {address}: {reason(error)}", address=address)
            not_sent.is_refused = isinstance(cause(error), ConnectionRefusedError)
            if not_sent.is_refused and address == META_DEFAULT:
                not_sent.hint += " keylane dev starts a cluster."
            raise self._explain(tls_problem(address, error)) or not_sent from cause(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise await self._failure_error(address, method, path, error) from cause(error)
        if status == 200:  # otherwise the server's own error is more specific
            _check_server_version(version, method)
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
        refused = refusal.error()
        if isinstance(refused, InvalidRequestError) and refused.unknown_call and version != VERSION:
            text = f"{refused.message}: it is keylane {version or 'of an unknown version'}"
            refused = refused.copy(message=f"{text[:400]}, and this client is {VERSION}")
        if request_id:  # beside the details, which are the server's
            vars(refused)["request_id"] = request_id
        raise refused

    async def _failure_error(
        self, address: str, method: str, path: str, error: Exception
    ) -> NotSentError | OutcomeUnknownError | ForeignServerError:
        """Return the error for a call whose connection failed or whose answer is not HTTP."""
        may_be_done = address in self._answering_addresses and method != aiohttp.hdrs.METH_GET
        problem = await self._tls_problem(address, error)
        # A TLS alert proves that nothing was done. A later probe does not, because the call may
        # have used an older connection.
        if problem is not None and (not may_be_done or tls_problem(address, error) is not None):
            return problem
        if problem is None and isinstance(error, aiohttp.ClientResponseError):
            return _not_http_error(address, method, path)
        text = reason(error) if problem is None else problem.message
        return no_answer(method, path, f"no answer from {address} to {method} {path}: {text}")

    async def get_text(
        self, address: str, path: str, *, timeout_ms: int, statuses: Container[int] = (200,)
    ) -> tuple[str, str]:
        """
        GET a text, such as a server's metrics. Credentials are only sent if the server requires
        them.

        Returns:
            The text, and the Date header of the response, which is the server's clock in whole
            seconds.

        Raises:
            NotSentError, OutcomeUnknownError, ForeignServerError: as for `control`, or because the
                status is not in `statuses`.
            UnauthenticatedError, AccessDeniedError: this client may not read it.
        """
        text, date, status = await self._request_text(address, path, timeout_ms, None)
        if status == UNAUTHENTICATED and self._credentials is not None:
            bearer = await self._credentials.bearer(address)
            text, date, status = await self._request_text(address, path, timeout_ms, bearer)
        if status in statuses:
            self._record_response(address)
            return text, date
        if status in (UNAUTHENTICATED, DENIED):
            try:
                refusal = msgspec.json.decode(text, type=ErrorBody)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass  # a proxy's error page
            else:
                raise refusal.error()
        raise ForeignServerError(
            f"{address} answered GET {path} with status {status}", address=address
        )

    async def _request_text(
        self, address: str, path: str, timeout_ms: int, bearer: str | None
    ) -> tuple[str, str, int]:
        """Return the text, the Date header and the status. Raises NotSentError or
        ForeignServerError.
        """
        refuse_virtual_address(address)
        try:
            async with self._session.get(
                f"{self._scheme}://{address}{path}",
                headers={} if bearer is None else _request_headers(bearer),
                allow_redirects=False,
                timeout=_client_timeout(timeout_ms),
                ssl=self._tls_of(address),
            ) as response:
                return await response.text(), response.headers.get("Date", ""), response.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            problem: KeylaneError | None = await self._tls_problem(address, error)
            if problem is None and isinstance(error, aiohttp.ClientResponseError):
                problem = _not_http_error(address, aiohttp.hdrs.METH_GET, path)
            raise problem or NotSentError(
                f"cannot reach {address}: {reason(error)}", address=address
            ) from cause(error)

    def renew(self, tls: TlsSettings) -> None:
        """Reload the TLS files for later connections. If that raises ConfigError, the old ones stay
        in use.
        """
        if self._tls_contexts is not None:
            self._tls_contexts.renew(tls)

    def _tls_of(self, address: str) -> ssl.SSLContext | bool:
        """Return the `ssl` argument of an aiohttp request to an address."""
        return True if self._tls_contexts is None else self._tls_contexts.of(address)

    def _record_response(self, address: str) -> None:
        """Record that this address has answered."""
        self._answering_addresses.add(address)
        self._disconnected_addresses.discard(address)

    async def _tls_problem(self, address: str, error: Exception) -> NotSentError | None:
        """Return the TLS problem that explains why a connection failed, or None if it was not TLS.
        May probe the server.
        """
        problem = tls_problem(address, error)
        if problem is None and is_disconnect(error) and self._should_probe(address):
            context = None if self._tls_contexts is None else self._tls_contexts.of(address)
            problem = await probe_tls(address, error, context)
        return self._explain(problem)

    def _should_probe(self, address: str) -> bool:
        """
        Return True if it is worth a second to find out why a server closed a connection.

        An address that has answered before is not probed the first time, because most servers that
        close a connection are simply stopping.
        """
        if address not in self._answering_addresses:
            return True
        if self._tls_contexts is None:
            return False
        is_repeated = address in self._disconnected_addresses
        self._disconnected_addresses.add(address)
        return is_repeated or bool(self._tls_contexts.own_certificate_problem())

    def _explain(self, problem: NotSentError | None) -> NotSentError | None:
        """Return the problem. If the server refuses this client's certificate, say what is wrong
        with it.
        """
        is_refused = problem is not None and problem.reason is Reason.CLIENT_CERTIFICATE
        if problem is None or self._tls_contexts is None or not is_refused:
            return problem
        explanation = self._tls_contexts.own_certificate_problem()
        if not self._tls_contexts.shows_certificate:
            explanation = "it requires a certificate, and this client has none"
        if not explanation:
            return problem
        return NotSentError(
            Reason.CLIENT_CERTIFICATE,
            f"the server at {problem.address} refuses this client: {explanation}",
            address=problem.address,
        )

    async def close(self) -> None:
        """Close the sessions and their connections, and stop renewing capabilities."""
        for task in list(self._renewal_tasks):
            task.cancel()
        await asyncio.gather(*self._renewal_tasks, return_exceptions=True)
        if self._credentials is not None:
            await self._credentials.close()
        for session in self._sessions:
            await session.close()
        if self._unclosed is not None:
            self._unclosed.detach()
        if self._tls_contexts is not None:
            await asyncio.sleep(TLS_END_SECONDS)


def client_network(
    tls: TlsSettings | None = None, token: str | TokenSource | None = None, *, owner: str = ""
) -> HttpNetwork:
    """
    Return a client's network with these TLS settings and this token, or with those from the
    environment (KEYLANE_TLS_CA, KEYLANE_TOKEN_FILE). See HttpNetwork for `owner`.

    Raises:
        ConfigError: a TLS file or the token cannot be used.
    """
    tls_settings = tls or tls_of_environment()
    return HttpNetwork(
        tls_settings,
        token=token,
        by_certificate=bool(tls_settings and tls_settings.cert),
        follows_files=True,
        owner=owner,
    )


def _create_session(**connections: Any) -> aiohttp.ClientSession:
    """Return a session whose connector gets these arguments in addition to the defaults."""
    connector = aiohttp.TCPConnector(
        limit=0, resolver=HostNames(), socket_factory=watched_socket, **connections
    )
    return aiohttp.ClientSession(connector=connector, trust_env=False)


def _client_timeout(timeout_ms: int) -> aiohttp.ClientTimeout:
    """Return aiohttp's timeouts for a call. They are exact, as heartbeats need; by default aiohttp
    rounds timeouts above 5 s up to a whole second.
    """
    return aiohttp.ClientTimeout(
        total=timeout_ms / 1000, sock_connect=CONNECT_SECONDS, ceil_threshold=math.inf
    )


def _encode_body(call: str, body: object, query: Mapping[str, str] | None) -> bytes:
    """Return the encoded body. Raises MessageTooLargeError, or InvalidRequestError if a text in the
    body or query has a lone surrogate.
    """
    try:
        encoded = b"" if body is None else encode_json(body)
        "".join((query or {}).values()).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{call}: not valid text: {error}") from None
    if len(encoded) > CONTROL_BYTES_MAX:
        raise MessageTooLargeError(
            f"{call}: a body of {len(encoded)} bytes, at most {CONTROL_BYTES_MAX}",
            size_bytes=len(encoded),
            limit_bytes=CONTROL_BYTES_MAX,
        )
    return encoded


def _request_headers(bearer: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json", VERSION_HEADER: VERSION}
    return headers if bearer is None else headers | {"authorization": f"Bearer {bearer}"}


def _check_server_version(version: str | None, method: str) -> None:
    """
    Check the version of the server that answered a call. An answer from a proxy has no version.

    Raises:
        VersionError: the versions are too far apart. The error's fate is UNKNOWN if the call may
            have changed something.
    """
    if version is None:
        return
    try:
        check_server(version, VERSION)
    except KeylaneError as error:
        if method == aiohttp.hdrs.METH_GET:
            raise
        raise error.copy(Fate.UNKNOWN) from None


def _not_http_error(address: str, method: str, path: str) -> ForeignServerError:
    """Return the error for an answer that is not HTTP, for example from a mail or SSH server."""
    return ForeignServerError(f"{address} answered {method} {path} not in HTTP", address=address)
