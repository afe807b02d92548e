"""Callers that send or take their bytes too slowly, each over TLS in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from concurrent.futures import Future, ThreadPoolExecutor

from support.access.secured_cluster import SecuredCluster

BETWEEN_S = 0.5
"""The seconds from one byte to the next."""


class SlowCallers:
    """Each future gives the seconds after which the server ended the connection, and what it
    answered.
    """

    def __init__(self, secured: SecuredCluster) -> None:
        self._host, _, port = secured.meta.rpartition(":")
        self._port = int(port)
        self._context = ssl.create_default_context(cafile=secured.tls.ca)
        host = f"Host: {self._host}\r\n"
        bearer = f"Authorization: Bearer {secured.admin_token}\r\n"
        post = f"POST /v1/subjects HTTP/1.1\r\n{host}{bearer}Content-Length: 5000\r\n\r\n"
        threads = ThreadPoolExecutor(max_workers=4)
        self.handshake = threads.submit(self._open_half, secured.broker)
        self.head = threads.submit(self._drip, b"GET / HTTP/1.1\r\nX: ")
        self.body = threads.submit(self._drip, post.encode())
        ask = f"GET /v1/openapi.json HTTP/1.1\r\n{host}\r\n".encode()
        self.reader = threads.submit(self._take_nothing, ask * 500)
        threads.shutdown(wait=False)

    @property
    def all(self) -> list[Future[tuple[float, bytes]]]:
        return [self.head, self.body, self.reader, self.handshake]

    @staticmethod
    def _open_half(address: str) -> tuple[float, bytes]:
        """Begin a handshake, and go no further."""
        host, _, port = address.rpartition(":")
        began = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=60) as caller:
            caller.sendall(b"\x16\x03\x01\x02\x00")
            with contextlib.suppress(ConnectionError):
                caller.recv(1)
        return time.monotonic() - began, b""

    def _connected(self) -> ssl.SSLSocket:
        plain = socket.create_connection((self._host, self._port))
        return self._context.wrap_socket(plain, server_hostname=self._host)

    def _drip(self, first: bytes) -> tuple[float, bytes]:
        """Send these bytes, and then one after the other."""
        began, answer = time.monotonic(), b""
        with self._connected() as caller, contextlib.suppress(ConnectionError, ssl.SSLError):
            caller.sendall(first)
            caller.settimeout(BETWEEN_S)
            while time.monotonic() - began < 60:
                caller.sendall(b"a")
                try:
                    data = caller.recv(65_536)
                except TimeoutError:
                    continue
                answer += data
                if not data:
                    break
        return time.monotonic() - began, answer

    def _take_nothing(self, asked: bytes) -> tuple[float, bytes]:
        """Ask for much, and read nothing."""
        began = time.monotonic()
        with self._connected() as caller, contextlib.suppress(ConnectionError, ssl.SSLError):
            caller.sendall(asked)
            while time.monotonic() - began < 60:
                time.sleep(BETWEEN_S)
                caller.sendall(
                    b"a"
                )  # its own window is full, so that it hears of an end in this way alone
        return time.monotonic() - began, b""
