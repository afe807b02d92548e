"""The pytest plugin. A test with the argument `keylane_cluster` gets its own cluster, and runs in
virtual time.

    @pytest.mark.keylane(brokers=2)
    async def test_order_survives_a_broker(keylane_cluster): ...

An `async def` test runs as the cluster's story, instead of in another plugin's event loop. A plain
test calls `keylane_cluster.run`. Other tests are not affected.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..protocol.errors import ConfigError, StoryError
from ..protocol.text import parse_number

if TYPE_CHECKING:
    from .cluster import VirtualCluster

FIXTURE = "keylane_cluster"
MARKER = (
    "keylane(brokers=1, copies=1, seed=0, auto_create='off', limit_s=3600, real_limit_s=60): "
    "options of the cluster of this test"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for the seed, with which a failing test can be repeated."""
    parser.getgroup("keylane").addoption(
        "--keylane-seed",
        metavar="N",
        help="the seed of every keylane cluster: a number, or `random` for one "
        "that a failure prints",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def keylane_cluster(request: pytest.FixtureRequest) -> Iterator[VirtualCluster]:
    """Provide a `keylane.testing.VirtualCluster` with the options from
    `@pytest.mark.keylane(...)`.
    """
    _check_examples(request.function)
    from . import VirtualCluster  # imported late, because most runs have no cluster

    options: dict[str, Any] = {}
    for marker in request.node.iter_markers("keylane"):
        if marker.args:
            raise ConfigError(
                f"the options of pytest.mark.keylane have names, not {marker.args!r:.100}"
            )
        options = {**marker.kwargs, **options}  # the nearest marker wins
    seed = request.config.getoption("--keylane-seed")
    if seed is not None:
        options["seed"] = _parse_seed(seed)
    try:
        cluster = VirtualCluster(**options)
    except ConfigError as error:
        raise ConfigError(f"@pytest.mark.keylane: {error.message}") from None
    except TypeError as error:
        problem = str(error).rpartition(") ")[2].partition(". Did you mean")[0]
        raise ConfigError(f"@pytest.mark.keylane: {problem}; there are {MARKER}") from None
    yield cluster
    cluster.close()


def _check_examples(test: object) -> None:
    """Raise StoryError for an async hypothesis test, because each example would need its own
    cluster.
    """
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", None)
    if inspect.iscoroutinefunction(inner):
        raise StoryError(
            f"@given runs a test once for each example, and {FIXTURE} has one story: "
            "call keylane.testing.run in a plain test, which makes a cluster for each"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Refuse async fixtures that use the cluster, because another plugin would run them in real
    time.
    """
    fixture = inspect.unwrap(fixturedef.func)
    is_async = inspect.iscoroutinefunction(fixture) or inspect.isasyncgenfunction(fixture)
    if is_async and FIXTURE in inspect.signature(fixture).parameters:
        raise ConfigError(
            f"async fixture {fixturedef.argname!r} takes {FIXTURE}, and would run outside of its "
            "virtual time: "
            "make it an async function that the test awaits, or an async context manager"
        )


def _parse_seed(text: str) -> int | None:
    if text == "random":
        return None
    seed = parse_number(text)
    if seed is None:
        raise ConfigError(f"--keylane-seed is a number or `random`, not {text!r:.40}")
    return seed


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """
    Run an async test that uses the fixture as the story of its cluster.

    A plain function replaces the test during this call, because a plugin whose hook runs first,
    such as anyio's, might run an async one in real time.
    """
    cluster: Any = pyfuncitem.funcargs.get(FIXTURE)
    owner = pyfuncitem.instance or pyfuncitem.module
    # Look up the original test, which an asyncio plugin may have replaced with a plain function.
    test = getattr(owner, pyfuncitem.originalname, None)
    if cluster is None or not inspect.iscoroutinefunction(test):
        return (yield)

    def run_story(**arguments: Any) -> None:
        cluster.run(test, **arguments)

    original_function, pyfuncitem.obj = pyfuncitem.obj, run_story
    try:
        return (yield)
    finally:
        pyfuncitem.obj = original_function
