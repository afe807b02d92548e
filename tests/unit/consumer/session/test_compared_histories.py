"""What the plain model of a partition says is what a real broker says, request by request."""

import asyncio
import random

import pytest

from support.session.compared_history import ComparedHistory
from support.session.history import ACTIONS_EACH, EXCLUSIVE

SEEDS = 300


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_real_broker_answers_as_the_model_does(loop, first):
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        ComparedHistory(rng, rng.choice(EXCLUSIVE), loop).play(ACTIONS_EACH)
