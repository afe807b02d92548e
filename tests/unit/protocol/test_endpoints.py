"""The table of endpoints: complete, without doubles, and what clients, servers and OpenAPI
follow.
"""

from __future__ import annotations

import re
from collections import Counter
from unittest.mock import MagicMock

import pytest

from keylane.broker.control import BrokerControl
from keylane.broker.copies.hand_over import HandingOver
from keylane.broker.parking import Parking
from keylane.broker.posting import MessagePosting
from keylane.broker.reading import MessageReading
from keylane.broker.scheduling import Scheduling
from keylane.metaserver.access.service import refusing_routes
from keylane.metaserver.calls import control_routes
from keylane.metaserver.why import WhyService
from keylane.protocol import endpoints
from keylane.protocol.endpoints import BROKER, METASERVER
from keylane.protocol.http.endpoint import Endpoint, Rights
from keylane.protocol.http.openapi import openapi_document
from tidy.tree import FILES

EVERY = {id(value): value for value in vars(endpoints).values() if isinstance(value, Endpoint)}


def test_metaserver_serves_every_endpoint_of_its_table():
    routes = control_routes(
        *(MagicMock() for _ in range(6)),
        resets=MagicMock(),
        removals=MagicMock(),
        starts=MagicMock(),
        publications=MagicMock(),
        balancer=MagicMock(),
    )
    routes += [*refusing_routes(), WhyService(routes, MagicMock(), clock=MagicMock()).route()]
    served = Counter((route.endpoint.method, route.endpoint.path) for route in routes)
    assert served == Counter((endpoint.method, endpoint.path) for endpoint in METASERVER)


HANDS_OVER = ("broker_group", "clock", "folder_ownership", "on_replaced")


def test_broker_serves_every_endpoint_of_its_table():
    names = ("broker_group", "broker_id", "clock", "registration")
    control = BrokerControl(MagicMock(), **{name: MagicMock() for name in names})
    posting = MessagePosting(MagicMock(), clock=MagicMock(), rng=MagicMock())
    reading = MessageReading(MagicMock())
    names = ("broker_group", "clock", "random_bits", "folder_ownership", "check_writable")
    scheduling = Scheduling(MagicMock(), MagicMock(), **{name: MagicMock() for name in names})
    parking = Parking(MagicMock(), MagicMock(), clock=MagicMock(), folder_ownership=None)
    routes = [
        *control.routes(),
        posting.route(),
        reading.route(),
        *scheduling.routes(),
        *parking.routes(),
        HandingOver(*[MagicMock()] * 3, **{name: MagicMock() for name in HANDS_OVER}).route(),
    ]
    assert [route.endpoint for route in routes] == list(BROKER)


def test_every_endpoint_is_in_a_table_once():
    listed = {
        id(endpoint)
        for endpoint in (
            *METASERVER,
            *BROKER,
            endpoints.METRICS,
            endpoints.OPENAPI,
            endpoints.FRONT,
        )
    }
    assert listed == set(EVERY)
    for table in (METASERVER, BROKER):
        assert len({(endpoint.method, endpoint.path) for endpoint in table}) == len(table)


OF_READERS = [endpoints.PARTITION_BOUNDS, endpoints.HOLD]
"""A question that is too long for an address, and what keeps messages until a job has read them."""


@pytest.mark.parametrize(
    "endpoint", EVERY.values(), ids=lambda endpoint: f"{endpoint.method} {endpoint.path}"
)
def test_endpoint_is_whole(endpoint):
    """Only a POST has a body, and what changes the cluster is not open to those who may only
    read.
    """
    assert endpoint.method in {"GET", "POST", "DELETE"}
    assert endpoint.method == "POST" or endpoint.request is None
    assert (endpoint.method == "GET") <= endpoint.repeatable
    assert (
        endpoint.is_get
        or endpoint.rights not in {Rights.READ, Rights.ANY}
        or endpoint in OF_READERS
    )
    assert endpoint.summary
    document = openapi_document([endpoint], program="test")
    operation = document["paths"][endpoint.path][endpoint.method.lower()]
    assert operation["x-rights"] == endpoint.rights.value


def test_path_of_encodes_names():
    path = endpoints.GROUP.path_of(subject="a/b ?", group="ü")
    assert path == "/v1/subjects/a%2Fb%20%3F/groups/%C3%BC"
    assert endpoints.SEAL.path_of(id=7) == "/v1/partitions/7/seal"


def test_path_of_raises_when_a_name_is_missing():
    with pytest.raises(KeyError):
        endpoints.GROUP.path_of(subject="s")


def test_paths_are_written_in_the_table_only():
    """No other module of the product spells a path of a control call; `endpoint.py` knows what a
    GET is, and so do those that serve pages.
    """
    spelled = re.compile(r"""["'](GET|POST)["']|["']/v1/(?!data")""")
    others = {file.name for file in FILES if spelled.search(file.text)}
    pages = {"console/app.py", "rpc/server.py"}
    assert others - pages == {"protocol/endpoints.py", "protocol/http/endpoint.py"}
