"""Every call and every frame, as a principal that has all rights but the one that it needs, and as
one that has that right.

A new call or frame is walked through too: its body is made of its type.
"""

from __future__ import annotations

import asyncio
import enum
import typing
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from keylane.protocol.access.rights import GRANTED, Rights
from keylane.protocol.endpoints import BROKER, FRONT, JOIN, METASERVER, METRICS, OPENAPI
from keylane.protocol.errors import AccessDeniedError, KeylaneError, UnauthenticatedError
from keylane.protocol.frames import Authenticate, Challenge, Hello, Request
from keylane.protocol.http.endpoint import Endpoint
from keylane.rpc.access.guard import FRAME_RIGHTS
from keylane.rpc.http_network import HttpNetwork
from support.access.guarded import GuardedCluster, capabilities

SUBJECT, OTHER, GROUP = "walked", "elsewhere", "walkers"
SESSION = "abcdefabcdefabcd"
"""A member of the group; and every text that has no other meaning."""
OF_ALL = {Rights.KNOWN: "a token", Rights.OPEN: "nothing"}
"""What needs no right: `test_calls_of_everybody_need_no_right` has them."""
WITHOUT = {
    Rights.PRODUCE: {Rights.PRODUCE},
    Rights.CONSUME: {Rights.CONSUME},
    Rights.READ: {Rights.READ, Rights.CONSUME},  # who may consume may read
    Rights.ADMINISTER: {Rights.ADMINISTER},
    Rights.CLUSTER: set[Rights](),
    Rights.JOIN: {Rights.CONSUME, Rights.ADMINISTER},
    Rights.ANY: set(GRANTED),
}
"""The right that a call needs → what its principal lacks; none but servers has the right of the
cluster.
"""
FRAMES = [kind for kind in typing.get_args(Request) if kind not in (Hello, Challenge, Authenticate)]
"""Frames of callers that are known."""
NAMES: dict[str, Any] = {"subject": SUBJECT, "group": GROUP, "session": SESSION}
"""Fields of these names have these values."""


class Walked(typing.NamedTuple):
    """A cluster with a subject, and tokens of principals by the right that they lack or have."""

    cluster: GuardedCluster
    partition_id: int
    lacks: dict[Rights, str]
    has: dict[Rights, str]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    with GuardedCluster(tmp_path_factory.mktemp("walked")) as cluster:
        yield asyncio.run(_prepare(cluster))


async def _prepare(cluster: GuardedCluster) -> Walked:
    await cluster.made(SUBJECT)
    lacks, has = {}, {}
    async with cluster.admin() as admin:
        await admin.create_subject(OTHER, partitions=1)
        described = await admin.describe_subject(SUBJECT)
        partition_id = described.partitions[0].partition_id
        for right, missing in WITHOUT.items():
            lacks[right] = await cluster.principal(
                f"lacks-{right}", *(each for each in GRANTED[:4] if each not in missing)
            )
            if right is Rights.ANY:
                await admin.grant(f"lacks-{right}", "read", subject=OTHER)
            has[right] = await cluster.principal(
                f"has-{right}", {Rights.ANY: "read", Rights.JOIN: "administer"}.get(right, right)
            )
    body = sample(JOIN.request, {})
    code, joined = await ask(cluster.meta, JOIN, has[Rights.CONSUME], {}, body)
    assert code == 0, joined
    return Walked(cluster, partition_id, lacks, has)


def sample(kind: Any, known: dict[str, Any]) -> Any:
    """A value of a type, as JSON has it: of a struct the fields that it needs, and those of known
    names.
    """
    kind = getattr(kind, "__supertype__", kind)
    if typing.get_origin(kind) is typing.Annotated:
        lows = [meta.ge for meta in kind.__metadata__ if getattr(meta, "ge", None) is not None]
        value = sample(kind.__origin__, known)
        return max([value, *lows]) if isinstance(value, int) else value
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        given, config = NAMES | known, kind.__struct_config__
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {
            field.encode_name: given[field.name]
            if field.name in given
            else sample(hints[field.name], known)
            for field in msgspec.structs.fields(kind)
            if field.required or (field.name in known and not config.array_like)
        }
        if config.array_like:
            return [*([] if config.tag is None else [config.tag]), *fields.values()]
        return fields
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind)).value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return inner[0]
    if origin in (tuple, list):
        return [sample(each, known) for each in inner if each is not ...]
    if origin is dict:
        return {}
    if origin is not None:  # a union
        return None if type(None) in inner else sample(inner[0], known)
    return {str: SESSION, int: 1, bool: False, float: 1.0, bytes: b"x"}[kind]


async def ask(
    address: str, endpoint: Endpoint[Any], token: str | None, names: dict[str, Any], body: Any
) -> tuple[int, Any]:
    """The code of the error, 0 if there is none; and what is answered."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    given: dict[str, Any] = {} if body is None else {"json": body}
    if endpoint.request is bytes:
        given = {"data": b"x"}
    url = f"http://{address}{endpoint.path_of(**names)}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(endpoint.method, url, headers=headers, **given) as answer,
    ):
        try:
            told = await answer.json()
        except aiohttp.ContentTypeError:
            told = {}
        return int(told.get("code", -1)) if answer.status >= 400 else 0, told


async def code_of(walked: Walked, endpoint: Endpoint[Any], token: str | None) -> int:
    """How a server answers a call: 0, or the code of its refusal."""
    address = walked.cluster.meta
    if endpoint in BROKER and endpoint not in METASERVER:
        address = walked.cluster.brokers[0].address
        token = token and (await capabilities(walked.cluster.meta, token))["bearer"]
    body = None
    if endpoint.request not in (None, bytes):
        body = sample(endpoint.request, {"partition_id": walked.partition_id})
    names = NAMES | {"id": walked.partition_id}
    return (await ask(address, endpoint, token, names, body))[0]


CALLS = [*dict.fromkeys((*METASERVER, *BROKER, FRONT, METRICS, OPENAPI))]


def shown(endpoint: Endpoint[Any]) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize(
    "endpoint", [each for each in CALLS if each.rights not in OF_ALL], ids=shown
)
async def test_call_is_denied_when_just_its_right_is_missing(
    walked: Walked, endpoint: Endpoint[Any]
):
    assert await code_of(walked, endpoint, walked.lacks[endpoint.rights]) == AccessDeniedError.code
    assert await code_of(walked, endpoint, None) == UnauthenticatedError.code


@pytest.mark.parametrize("endpoint", [each for each in CALLS if each.rights in OF_ALL], ids=shown)
async def test_calls_of_everybody_need_no_right(walked: Walked, endpoint: Endpoint[Any]):
    """A new call that needs nothing is a decision: it has to be named here."""
    assert shown(endpoint) in {
        "GET /",
        "GET /v1/health",
        "GET /health/live",
        "GET /health/ready",
        "GET /metrics",
        "GET /v1/openapi.json",
        "POST /v1/access/capability",
    }
    code = await code_of(walked, endpoint, None)
    assert (code == UnauthenticatedError.code) is (endpoint.rights is Rights.KNOWN)


@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
async def test_frame_is_denied_when_just_its_right_is_missing(walked: Walked, kind: Any):
    """And passes with it, whatever the broker then says of the frame."""
    right = FRAME_RIGHTS.get(kind, Rights.CONSUME)
    frame = msgspec.convert(sample(kind, {"partition_id": walked.partition_id}), kind)
    for token, denied in ((walked.lacks[right], True), (walked.has[right], False)):
        network = HttpNetwork(token=token)
        try:
            network.add_metaservers([walked.cluster.meta])
            channel = await network.open_channel(
                walked.cluster.brokers[0].address, timeout_ms=10_000
            )
            error: KeylaneError | None = None
            try:
                await channel.call(frame, b"", timeout_ms=10_000)
            except KeylaneError as refused:
                error = refused
            assert isinstance(error, AccessDeniedError) is denied, error
        finally:
            await network.close()
