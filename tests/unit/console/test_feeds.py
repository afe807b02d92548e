import asyncio
import random

import pytest

from keylane.console import feeds
from keylane.console.feeds import Feeds
from keylane.protocol.access.tokens import make_token
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import OverloadedError

A, B, C = (make_token(random.Random(number).getrandbits) for number in range(3))


@pytest.fixture
def few(monkeypatch):
    """Feeds of which two may be open."""
    monkeypatch.setattr(feeds, "FEEDS_MAX", 2)
    return Feeds("127.0.0.1:1", tls=None, clock=SystemClock())


async def test_feed_with_an_open_stream_stays_when_others_come(few):
    async with few.use("") as (streamed, _):
        for token in (A, B, C):
            async with few.use(token):
                pass
        async with few.use("") as (again, _):
            assert again is streamed
    await few.close()


async def test_feed_that_nobody_uses_makes_room_oldest_first(few):
    found = []
    for token in (A, B, A, C, A):
        async with few.use(token) as (feed, _):
            found.append(feed)
    assert found[0] is found[2] is found[4]
    async with few.use(B) as (feed, _):
        assert feed is not found[1]
    await few.close()


async def test_feeds_that_are_all_in_use_refuse_another_token_until_one_is_free(few):
    used = few.use(A), few.use(B)
    for each in used:
        await each.__aenter__()
    with pytest.raises(OverloadedError) as caught:
        await few.use(C).__aenter__()
    assert caught.value.limit == 2
    await used[0].__aexit__(None, None, None)
    async with asyncio.timeout(5), few.use(C):
        pass
    await used[1].__aexit__(None, None, None)
    await few.close()
