"""Principals that others vouch for: client certificates, and tokens of an outside issuer over an
https JWKS.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keylane import Admin, Producer, TlsSettings
from keylane.protocol.access.tokens import make_token
from keylane.protocol.errors import (
    AccessDeniedError,
    Reason,
    UnauthenticatedError,
)
from support.access.certificates import CertificateShelf
from support.access.issuer import AUDIENCE, ISSUER, OutsideIssuer
from support.cluster import Program
from support.raising import raises

SUBJECT = "vouched"


class JwksServer:
    """Serves the keys of an issuer over https."""

    def __init__(self, shelf: CertificateShelf, outside: OutsideIssuer) -> None:
        files = shelf.files("jwks")

        class KeysAnswer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = outside.file.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), KeysAnswer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["tls_cert"], files["tls_key"])
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}/jwks.json"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class VouchedCluster:
    """A metaserver and a broker over TLS, which take certificates of an authority, and an issuer's
    tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.shelf = CertificateShelf(folder)
        self.clients = CertificateShelf(folder, "clients")
        both = folder / "both.pem"  # brokers show their certificates too
        both.write_bytes(self.clients.ca.read_bytes() + self.shelf.ca.read_bytes())
        self.outside = OutsideIssuer(folder / "jwks.json", one="RS256")
        self.jwks = JwksServer(self.shelf, self.outside)
        self.admin_token = make_token(secrets.randbits)
        (folder / "admin.token").write_text(self.admin_token)
        (folder / "cluster.token").write_text(make_token(secrets.randbits))
        files = self.shelf.files()
        shared = "".join(f'{name} = "{path}"\n' for name, path in files.items()) + 'access = "on"\n'
        (folder / "meta.toml").write_text(
            f'{shared}admin_token_file = "admin.token"\ncluster_token_file = "cluster.token"\n'
            f'tls_client_ca = "{both}"\ntls_client_principals = true\n'
            f'jwt_issuer = "{ISSUER}"\njwt_audience = "{AUDIENCE}"\njwt_jwks = "{self.jwks.url}"\n'
            f'jwt_jwks_ca = "{self.shelf.ca}"\njwt_groups_claim = "groups"\n'
        )
        (folder / "broker.toml").write_text(f'{shared}token_file = "cluster.token"\n')
        self.metaserver = Program(
            *("keylane.metaserver", "--config", str(folder / "meta.toml")),
            *("--data", str(folder / "meta")),
        ).ready()
        self.meta = self.metaserver.address
        self.broker = Program(
            *("keylane.broker", "--config", str(folder / "broker.toml"), "--group", "g1"),
            *("--data", str(folder / "broker"), "--meta", self.meta),
        ).ready()
        self.tls = TlsSettings(ca=str(self.shelf.ca))

    def admin(self) -> Admin:
        return Admin(self.meta, tls=self.tls, token=self.admin_token)

    def certified(self, name: str, authority: CertificateShelf | None = None) -> TlsSettings:
        """A client with a certificate of this common name."""
        shelf = authority or self.clients
        cert, key = shelf.put(f"client-{name}", shelf.authority.issue([name]))
        return TlsSettings(ca=str(self.shelf.ca), cert=str(cert), key=str(key))

    def stop(self) -> None:
        for program in (self.broker, self.metaserver):
            program.stop()
        self.jwks.stop()


@pytest.fixture(scope="module")
def vouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VouchedCluster]:
    cluster = VouchedCluster(tmp_path_factory.mktemp("vouched"))

    async def prepare() -> None:
        async with cluster.admin() as admin, asyncio.timeout(60):
            while not any(broker.available for broker in (await admin.list_brokers()).brokers):
                await asyncio.sleep(0.05)
            await admin.create_subject(SUBJECT, partitions=1)

    asyncio.run(prepare())
    yield cluster
    cluster.stop()


async def test_client_certificate_is_a_principal_by_its_name(vouched: VouchedCluster):
    async with vouched.admin() as admin:
        await admin.grant("cert:shop", "produce", subject=SUBJECT)
    async with Producer(vouched.meta, tls=vouched.certified("shop")) as producer:
        await producer.send(SUBJECT, b"1", key=b"k")
    async with Producer(vouched.meta, tls=vouched.certified("other")) as producer:
        with pytest.raises(AccessDeniedError) as refused:
            await producer.send(SUBJECT, b"1", key=b"k")
        assert refused.value.principal == "cert:other"
    with pytest.raises(UnauthenticatedError):
        async with Producer(vouched.meta, tls=vouched.tls) as producer:
            await producer.send(SUBJECT, b"1", key=b"k")


async def test_certificate_of_another_authority_names_no_principal(vouched: VouchedCluster):
    stranger = CertificateShelf(vouched.shelf.folder, "strangers")
    async with Admin(vouched.meta, tls=vouched.certified("shop", stranger)) as admin:
        with raises(Reason.CLIENT_CERTIFICATE):
            await admin.list_brokers()


async def test_token_counts_before_the_certificate(vouched: VouchedCluster):
    async with Admin(
        vouched.meta, tls=vouched.certified("shop"), token=vouched.admin_token
    ) as admin:
        assert (await admin.list_brokers()).brokers


async def test_token_of_the_outside_issuer_is_a_principal_with_groups(vouched: VouchedCluster):
    async with vouched.admin() as admin:
        await admin.grant("jwt:alice", "produce", subject=SUBJECT)
        await admin.grant("group:auditors", "read", subject=SUBJECT)
    token = vouched.outside.token()
    async with Producer(vouched.meta, tls=vouched.tls, token=token) as producer:
        await producer.send(SUBJECT, b"2", key=b"k")
    with pytest.raises(UnauthenticatedError):
        async with Admin(vouched.meta, tls=vouched.tls, token=vouched.outside.token(aud="x")) as a:
            await a.list_brokers()
    member = vouched.outside.token(sub="bob", groups=["auditors"])
    async with Admin(vouched.meta, tls=vouched.tls, token=member) as admin:
        assert await admin.describe_subject(SUBJECT)
    async with vouched.admin() as admin:
        await admin.revoke_grant("group:auditors", "read", subject=SUBJECT)
    async with Admin(vouched.meta, tls=vouched.tls, token=member) as admin:
        with pytest.raises(AccessDeniedError):
            await admin.describe_subject(SUBJECT)


async def test_change_of_a_group_ends_what_its_members_were_given(vouched: VouchedCluster):
    async with vouched.admin() as admin:
        await admin.grant("group:senders", "produce", subject=SUBJECT)
    token = vouched.outside.token(sub="carol", groups=["senders"])

    async def send_on(producer: Producer) -> None:
        async with asyncio.timeout(5):
            while True:
                await producer.send(SUBJECT, b"4", key=b"k")
                await asyncio.sleep(0.05)

    async with Producer(vouched.meta, tls=vouched.tls, token=token) as producer:
        await producer.send(SUBJECT, b"3", key=b"k")
        async with vouched.admin() as admin:
            await admin.revoke_grant("group:senders", "produce", subject=SUBJECT)
        with pytest.raises(AccessDeniedError):
            await send_on(producer)


async def test_key_of_the_issuer_is_read_when_it_is_new(vouched: VouchedCluster):
    vouched.outside.add("two", "ES256")
    vouched.outside.publish()
    async with vouched.admin() as admin:
        await admin.grant("jwt:dave", "administer")
    async with asyncio.timeout(30):
        while True:
            token = vouched.outside.token("two", sub="dave")
            try:
                async with Admin(vouched.meta, tls=vouched.tls, token=token) as admin:
                    assert (await admin.list_brokers()).brokers
                return
            except UnauthenticatedError:
                await asyncio.sleep(0.5)  # keys are read at most each ten seconds


def test_tokens_stand_for_no_outside_principal(vouched: VouchedCluster):
    """An administrator makes none that a certificate or an issuer would have to vouch for."""

    async def ask() -> None:
        async with vouched.admin() as admin:
            for name in ("jwt:alice", "cert:shop", "group:ops"):
                with raises(Reason.NAME_INVALID):
                    await admin.create_token(name)

    asyncio.run(ask())
    assert json.loads(vouched.outside.file.read_text())["keys"]
