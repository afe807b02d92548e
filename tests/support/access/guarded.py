"""A cluster of real processes with access control."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import aiohttp

from keylane import Admin
from keylane.protocol.access.tokens import make_token
from support.cluster import Cluster


class GuardedCluster(Cluster):
    """A cluster with access control, and the token of its administrator."""

    def __init__(
        self, folder: Path, brokers: int = 1, *, meta_settings: str = "", broker_settings: str = ""
    ) -> None:
        self.folder = folder
        self.admin_token = make_token(secrets.randbits)
        (folder / "admin.token").write_text(self.admin_token)
        (folder / "cluster.token").write_text(make_token(secrets.randbits))
        super().__init__(
            folder,
            brokers,
            meta_settings=(
                f'access = "on"\nadmin_token_file = "{folder}/admin.token"\n'
                f'cluster_token_file = "{folder}/cluster.token"\n{meta_settings}'
            ),
            broker_settings=f'access = "on"\ntoken_file = '
            f'"{folder}/cluster.token"\n{broker_settings}',
        )

    def admin(self) -> Admin:
        return Admin(self.meta, token=self.admin_token)

    async def principal(self, name: str, *rights: str, subject: str = "*") -> str:
        """A token of a principal with these rights."""
        async with self.admin() as admin:
            token = (await admin.create_token(name)).token
            for right in rights:
                await admin.grant(name, right, subject=subject)
        return token

    async def made(self, subject: str, partitions: int = 1) -> None:
        """Create a subject, as soon as the brokers are there."""
        async with self.admin() as admin, asyncio.timeout(60):
            while not any(broker.available for broker in (await admin.list_brokers()).brokers):
                await asyncio.sleep(0.05)
            await admin.create_subject(subject, partitions=partitions)


async def refusal_of(address: str, path: str, *, token: str | None = None, **given: Any) -> int:
    """The code of the error with which a server answers."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    headers |= given.pop("headers", {})
    method = given.pop("method", "GET")
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{address}{path}", headers=headers, **given) as answer,
    ):
        assert answer.status >= 400
        return int((await answer.json())["code"])


async def figures_of(address: str) -> str:
    """The metrics of a server."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/metrics") as answer,
    ):
        return await answer.text()


async def capabilities(address: str, token: str) -> dict[str, Any]:
    """What a metaserver gives for a token."""
    headers = {"Authorization": f"Bearer {token}"}
    url = f"http://{address}/v1/access/capability"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, headers=headers, json={}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        given: dict[str, Any] = await answer.json()
        return given
