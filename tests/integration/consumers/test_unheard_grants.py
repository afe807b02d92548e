"""A grant that its session never learned of, or whose release was lost, blocks no other session."""

import asyncio

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Grants, Heartbeat, Join
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import hosting_broker

A, B = "a" * 16, "b" * 16


def held(grants: Grants) -> tuple[tuple[int, int], ...]:
    """(partition id, token) of each grant."""
    return tuple((grant.partition.partition_id, grant.token) for grant in grants.grants)


async def test_grant_that_its_session_does_not_hold_is_released(tmp_path):
    """A revoked partition is granted to another session once its session, at the newest version,
    does not list it.
    """
    network = HttpNetwork()
    try:
        async with running_metaserver(MetaserverSettings(data=tmp_path, port=0)) as running:
            meta = MetaClient(network, [running.address])
            async with hosting_broker(meta, "left"):
                await meta.create_subject(CreateSubject(subject="s", partitions=2))
                await meta.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
                first = await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
                await meta.call(endpoints.JOIN, Join(subject="s", group="g", session=B))
                kept = await meta.call(
                    endpoints.HEARTBEAT, Heartbeat(session=A, known_version=first.version)
                )
                assert (len(first.grants), len(kept.grants)) == (2, 1)

                async def taken() -> tuple[tuple[int, int], ...]:
                    return held(await meta.call(endpoints.HEARTBEAT, Heartbeat(session=B)))

                # Still handing over, saying nothing of it, or not up to date: none of these
                # releases the lease.
                for known, holding in [
                    (kept.version, held(first)),
                    (kept.version, None),
                    (first.version, ()),
                    (-1, ()),
                ]:
                    await meta.call(
                        endpoints.HEARTBEAT,
                        Heartbeat(session=A, known_version=known, holding=holding),
                    )
                    assert await taken() == ()

                version = (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=B))).version
                waiting = asyncio.create_task(
                    meta.call(
                        endpoints.HEARTBEAT,
                        Heartbeat(session=B, known_version=version, wait_ms=5_000),
                    )
                )
                same = await meta.call(
                    endpoints.HEARTBEAT,
                    Heartbeat(session=A, known_version=kept.version, holding=held(kept)),
                )
                assert same == kept
                passed_on = held(await waiting)
                assert [key for key, _token in passed_on] == list(
                    dict(held(first)).keys() - dict(held(kept)).keys()
                )
                assert passed_on[0][1] > max(token for _key, token in held(first))
    finally:
        await network.close()
