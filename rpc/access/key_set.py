"""Caches the public keys (JWKS) of an external token issuer, from a file or an https URL.

    find(kid) ─▶ known and fresh? ─▶ the key
                 else read, at most every REFRESH_INTERVAL_MS_MIN ─▶ the key, or None

If the source cannot be read, the cached keys remain valid for STALE_MS_MAX; after that no token is
accepted.

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
REFRESH_INTERVAL_MS_MIN: Final = 10_000
"""The minimum time in milliseconds between two reads of the source that are caused by tokens with
unknown keys.
"""
STALE_MS_MAX: Final = 86_400_000
BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 100
FETCH_TIMEOUT_S: Final = 5.0


class _Document(msgspec.Struct):
    keys: list[dict[str, Any]]


class KeySet:
    """
    The issuer's keys by id.

    Args:
        source: the path of a file, or an https URL.
        ca: PEM file of the certificate authority for the URL; "" for the system's authorities.
        boot_ms: returns the time since boot in milliseconds.
    """

    def __init__(self, source: str, *, ca: str = "", boot_ms: Callable[[], int]) -> None:
        self._source = source
        self._is_url = source.startswith("https://")
        self._context = ssl.create_default_context(cafile=ca or None) if self._is_url else None
        self._max_age_ms = FRESH_URL_MS if self._is_url else FRESH_FILE_MS
        self._boot_ms = boot_ms
        self._keys: dict[str, dict[str, Any]] = {}
        self._read_at_ms: int | None = None
        self._attempted_at_ms: int | None = None
        self._lock = asyncio.Lock()
        self.version = 0
        """A number that increases when the keys change."""

    async def find(self, kid: str) -> dict[str, Any] | None:
        """
        Return the key with this id, or None if the issuer has no such key.

        Raises:
            UnavailableError: no read has succeeded for STALE_MS_MAX.
        """
        if self._is_refresh_due(kid):
            async with self._lock:
                if self._is_refresh_due(kid):
                    await self._refresh()
        now_ms = self._boot_ms()
        if self._read_at_ms is None or now_ms - self._read_at_ms > STALE_MS_MAX:
            raise UnavailableError(
                Reason.ISSUER_UNREACHABLE, f"the keys of the issuer in {self._source} are not known"
            )
        return self._keys.get(kid)

    def _is_refresh_due(self, kid: str) -> bool:
        now_ms = self._boot_ms()
        if self._attempted_at_ms is None:
            return True
        since_attempt_ms = now_ms - self._attempted_at_ms
        is_fresh = self._read_at_ms is not None and now_ms - self._read_at_ms < self._max_age_ms
        if is_fresh and kid in self._keys:
            return False
        return since_attempt_ms >= min(REFRESH_INTERVAL_MS_MIN, self._max_age_ms)

    async def _refresh(self) -> None:
        try:
            text = await (self._fetch_url() if self._is_url else asyncio.to_thread(self._read_file))
            document = msgspec.json.decode(text, type=_Document)
        except (
            OSError,
            TimeoutError,
            aiohttp.ClientError,
            msgspec.MsgspecError,
            ValueError,
        ) as error:
            log.warning("cannot read the issuer's keys: %s: %s", self._source, error)
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
            self._attempted_at_ms = self._boot_ms()

    def _read_file(self) -> bytes:
        with Path(self._source).open("rb") as file:
            text = file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"over {BYTES_MAX} bytes")
        return text

    async def _fetch_url(self) -> bytes:
        timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(self._source, ssl=self._context or True, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            text = b""
            async for chunk in response.content.iter_chunked(1 << 16):
                text += chunk
                if len(text) > BYTES_MAX:
                    raise ValueError(f"over {BYTES_MAX} bytes")
            return text
