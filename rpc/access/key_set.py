"""The public keys of an outside issuer (JWKS) from a file or an https URL; they are cached, and
read again when they change.

    find(kid) ─▶ known and fresh? ─▶ the key
                 else read, at most every ASK_AGAIN_MS ─▶ the key, or None

If the source cannot be read, the keys stay valid for STALE_MS_MAX; after that no token is accepted.

Source: RFC 7517.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from ...protocol.errors import Reason, UnavailableError

log = logging.getLogger("keylane.metaserver")

FRESH_URL_MS: Final = 300_000
FRESH_FILE_MS: Final = 5_000
ASK_AGAIN_MS: Final = 10_000
"""Least milliseconds between two reads of the source because of tokens with unknown keys."""
STALE_MS_MAX: Final = 86_400_000
BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 100
READ_S: Final = 5.0


class _Document(msgspec.Struct):
    keys: list[dict[str, Any]]


class KeySet:
    """
    Keys by id.

    Args:
        where: path of a file, or an https URL.
        ca: PEM file of the certificate authority for the URL; "": those of the machine.
    """

    def __init__(self, where: str, *, ca: str = "", boot_ms: Callable[[], int]) -> None:
        self._where = where
        self._is_url = where.startswith("https://")
        self._context = ssl.create_default_context(cafile=ca or None) if self._is_url else None
        self._fresh_ms = FRESH_URL_MS if self._is_url else FRESH_FILE_MS
        self._boot_ms = boot_ms
        self._keys: dict[str, dict[str, Any]] = {}
        self._read_at_ms: int | None = None
        self._tried_at_ms: int | None = None
        self._turn = asyncio.Lock()
        self.version = 0
        """Number that changes with the keys."""

    async def find(self, kid: str) -> dict[str, Any] | None:
        """
        Return the key with this id; None: the issuer has no such key.

        Raises:
            UnavailableError: the keys could not be read for too long.
        """
        if self._is_due(kid):
            async with self._turn:
                if self._is_due(kid):
                    await self._read()
        now_ms = self._boot_ms()
        if self._read_at_ms is None or now_ms - self._read_at_ms > STALE_MS_MAX:
            raise UnavailableError(
                Reason.ISSUER_UNREACHABLE, f"the keys of the issuer in {self._where} are not known"
            )
        return self._keys.get(kid)

    def _is_due(self, kid: str) -> bool:
        now_ms = self._boot_ms()
        if self._tried_at_ms is None:
            return True
        waited_ms = now_ms - self._tried_at_ms
        fresh = self._read_at_ms is not None and now_ms - self._read_at_ms < self._fresh_ms
        if fresh and kid in self._keys:
            return False
        return waited_ms >= min(ASK_AGAIN_MS, self._fresh_ms)

    async def _read(self) -> None:
        try:
            text = await (self._fetch() if self._is_url else asyncio.to_thread(self._load))
            document = msgspec.json.decode(text, type=_Document)
        except (
            OSError,
            TimeoutError,
            aiohttp.ClientError,
            msgspec.MsgspecError,
            ValueError,
        ) as error:
            log.warning("cannot read the issuer's keys: %s: %s", self._where, error)
        else:
            keys = {
                key["kid"]: key
                for key in document.keys[:KEYS_MAX]
                if isinstance(key.get("kid"), str) and key.get("use", "sig") == "sig"
            }
            if keys != self._keys:
                self._keys = keys
                self.version += 1
            self._read_at_ms = self._boot_ms()
        finally:
            self._tried_at_ms = self._boot_ms()

    def _load(self) -> bytes:
        with Path(self._where).open("rb") as file:
            text = file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"over {BYTES_MAX} bytes")
        return text

    async def _fetch(self) -> bytes:
        timeout = aiohttp.ClientTimeout(total=READ_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(self._where, ssl=self._context or True, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            text = b""
            async for part in answer.content.iter_chunked(1 << 16):
                text += part
                if len(text) > BYTES_MAX:
                    raise ValueError(f"over {BYTES_MAX} bytes")
            return text
