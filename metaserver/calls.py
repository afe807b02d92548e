"""The control calls of a metaserver: path, body and answer of each, and who does it.

The same table makes the routes of the server and the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..protocol.control import (
    AcceptFolder,
    BrokerHeartbeat,
    BrokerView,
    BrokerWelcome,
    CreateSubject,
    Done,
    Grants,
    GroupList,
    GroupView,
    Health,
    Heartbeat,
    Join,
    Joined,
    Leave,
    RefusedBroker,
    ReleaseGrant,
    SubjectList,
    SubjectView,
    Suspend,
    SwitchGroup,
)
from ..protocol.errors import InvalidRequestError
from ..protocol.limits import PULL_WAIT_MS_MAX
from ..protocol.operations import Cordon, OperationList, OperationView, Reshape, SubjectHistory
from ..protocol.progress import GroupReset, ResetGroup
from ..protocol.queues import QueueList
from ..protocol.routing import OrderStrategy, Route
from ..protocol.verification import Verification
from ..rpc.server import ControlRoute, Params, whole_number
from .catalogue.service import Catalogue
from .groups.service import GroupService
from .operations.driver import Reshaper
from .resets.service import ResetService
from .verify.service import Verifier


@dataclass(frozen=True, slots=True)
class Call:
    """One control call.  `query` names what may stand behind the question mark."""

    method: str
    path: str
    body: type[msgspec.Struct] | None
    answer: type[msgspec.Struct]
    handler: Callable[[Any, Params], Awaitable[object]]
    summary: str
    query: tuple[str, ...] = ()


def control_calls(
    catalogue: Catalogue,
    members: GroupService,
    health: Callable[[], Awaitable[Health]],
    reshaper: Reshaper | None = None,
    verifier: Verifier | None = None,
    resetter: ResetService | None = None,
) -> list[Call]:
    """Every call, in the order of `protocol/control.py`; without a reshaper partitions cannot be changed."""
    return [
        *_subject_calls(catalogue),
        *_consumer_calls(members, catalogue),
        Call("GET", "/v1/health", None, Health, lambda _body, _: health(), "Is it ready."),
        *(_operation_calls(reshaper) if reshaper is not None else ()),
        *(_verify_calls(verifier) if verifier is not None else ()),
        *(_reset_calls(resetter) if resetter is not None else ()),
    ]


def _subject_calls(catalogue: Catalogue) -> list[Call]:
    async def route(_body: None, params: Params) -> Route:
        ask = partial(
            catalogue.route,
            params["subject"],
            known_version=whole_number(params, "known_version", -1, low=-1),
            wait_ms=whole_number(params, "wait_ms", 0, high=PULL_WAIT_MS_MAX),
            order_strategy=strategy(params),
        )
        return await catalogue.retry_while_empty(ask)

    return [
        Call(
            "POST",
            "/v1/brokers/heartbeat",
            BrokerHeartbeat,
            BrokerWelcome,
            lambda body, _: catalogue.report(body),
            "A broker reports itself; the first time registers it.",
        ),
        Call(
            "POST",
            "/v1/brokers/{group}/cordon",
            Cordon,
            BrokerView,
            lambda body, params: catalogue.cordon(params["group"], body),
            "Keep a broker group from new partitions, or let it have some again.",
        ),
        Call(
            "POST",
            "/v1/brokers/{group}/accept",
            AcceptFolder,
            RefusedBroker,
            lambda body, params: catalogue.accept_folder(params["group"], body),
            "Go on with a copy of a data folder that is refused because it is behind.",
        ),
        Call(
            "POST",
            "/v1/subjects",
            CreateSubject,
            SubjectView,
            lambda body, _: catalogue.create(body),
            "Create a subject; again with the same settings changes nothing.",
        ),
        Call(
            "GET",
            "/v1/subjects",
            None,
            SubjectList,
            lambda _body, _: catalogue.subjects(),
            "All subjects, by name.",
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}",
            None,
            SubjectView,
            lambda _body, params: catalogue.subject(params["subject"]),
            "One subject with its route.",
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}/route",
            None,
            Route,
            route,
            "The route; waits up to wait_ms for one that differs from known_version.",
            ("known_version", "wait_ms", "order_strategy"),
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}/queues",
            None,
            QueueList,
            lambda _body, params: catalogue.queues(params["subject"]),
            "The logic queues of a static subject, each a chain of partitions with its logic offsets.",
        ),
    ]


def _consumer_calls(members: GroupService, catalogue: Catalogue) -> list[Call]:
    return [
        Call(
            "POST",
            "/v1/consumers/join",
            Join,
            Joined,
            lambda body, _: catalogue.retry_while_empty(partial(members.join, body)),
            "Begin a consumer session.",
        ),
        Call(
            "POST",
            "/v1/consumers/heartbeat",
            Heartbeat,
            Grants,
            lambda body, _: members.heartbeat(body),
            "Renew a session; returns at once when its grants differ from known_version.",
        ),
        Call(
            "POST",
            "/v1/consumers/release",
            ReleaseGrant,
            Done,
            lambda body, _: members.release(body),
            "The hand-over of a partition is finished.",
        ),
        Call(
            "POST",
            "/v1/consumers/suspend",
            Suspend,
            Done,
            lambda body, _: members.suspend(body),
            "Grant a session nothing, and take back what it holds; or let it take part again.",
        ),
        Call(
            "POST",
            "/v1/consumers/leave",
            Leave,
            Done,
            lambda body, _: members.leave(body),
            "End a session; what it held is free.",
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}/groups/{group}",
            None,
            GroupView,
            lambda _body, params: members.group(params["subject"], params["group"]),
            "Who owns which partition for a consumer group.",
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}/groups",
            None,
            GroupList,
            lambda _body, params: members.groups(params["subject"]),
            "The consumer groups of a subject.",
        ),
        Call(
            "POST",
            "/v1/subjects/{subject}/groups/{group}/strategy",
            SwitchGroup,
            GroupView,
            lambda body, params: members.switch(params["subject"], params["group"], body),
            "Have a group consume in another way; its sessions end, and old owners are fenced.",
        ),
    ]


def _verify_calls(verifier: Verifier) -> list[Call]:
    return [
        Call(
            "GET",
            "/v1/verify",
            None,
            Verification,
            lambda _body, _: verifier.verify(),
            "Thirteen checks between the database and the brokers.",
        )
    ]


def _reset_calls(resetter: ResetService) -> list[Call]:
    return [
        Call(
            "POST",
            "/v1/subjects/{subject}/groups/{group}/reset",
            ResetGroup,
            GroupReset,
            lambda body, params: resetter.reset(params["subject"], params["group"], body),
            "Set the progress of a consumer group that has no live consumers.",
        )
    ]


def _operation_calls(reshaper: Reshaper) -> list[Call]:
    return [
        Call(
            "POST",
            "/v1/operations",
            Reshape,
            OperationList,
            lambda body, _: reshaper.begin(body),
            "Begin to change partitions, or plan it; the operations go on by themselves.",
        ),
        Call(
            "POST",
            "/v1/operations/{id}/cancel",
            None,
            OperationView,
            lambda _body, params: reshaper.cancel(whole_number(params, "id", 0)),
            "Undo an operation of which nothing is sealed yet.",
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}/operations",
            None,
            OperationList,
            lambda _body, params: reshaper.operations(params["subject"]),
            "The latest operations of a subject, the newest first.",
        ),
        Call(
            "GET",
            "/v1/subjects/{subject}/history",
            None,
            SubjectHistory,
            lambda _body, params: reshaper.history(params["subject"]),
            "Every partition a subject ever had, with parents and end offsets.",
        ),
    ]


def control_routes(calls: Sequence[Call]) -> list[ControlRoute]:
    """The calls as routes of a server."""
    return [ControlRoute(one.method, one.path, one.body, one.handler) for one in calls]


def strategy(params: Params) -> OrderStrategy | None:
    """The order strategy of the query, if there is one.  Raises InvalidRequestError."""
    text = params.get("order_strategy")
    try:
        return None if text is None else OrderStrategy(text)
    except ValueError:
        spelled = ", ".join(OrderStrategy)
        raise InvalidRequestError(f"order_strategy is one of {spelled}, not {text!r:.40}") from None
