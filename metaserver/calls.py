"""Routes the control endpoints of `protocol/endpoints.py` to a metaserver's services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.access.rights import Rights
from ..protocol.control import AutoCreate, GroupView, Health, SubjectView
from ..protocol.errors import InvalidRequestError
from ..protocol.limits import PULL_WAIT_MS_MAX
from ..protocol.routing import OrderStrategy, Route
from ..rpc.access.guard import is_allowed
from ..rpc.network import Network
from ..rpc.operating.probes import probe_routes
from ..rpc.server import ControlRoute, Params, whole_number
from .catalogue.service import Catalogue
from .cluster.copy_sets import (
    change_copy_set,
    forget_copy,
    offer_place,
    promote_copy,
    set_copies,
)
from .cluster.queues import read_queues
from .groups.operators import group_settings
from .groups.service import GroupService
from .groups.views import list_groups, read_group
from .operations.balancing import Balancer
from .operations.driver import OperationDriver
from .operations.views import subject_history
from .publications.service import PublicationService
from .removals.service import RemovalService
from .resets.live import LiveResets
from .sql.database import Database
from .starts.service import StartService
from .verify.service import verify_cluster


def control_routes(
    database: Database,
    network: Network,
    catalogue: Catalogue,
    groups: GroupService,
    health: Callable[[], Awaitable[Health]],
    operations: OperationDriver,
    *,
    resets: LiveResets,
    removals: RemovalService,
    starts: StartService,
    publications: PublicationService,
    balancer: Balancer,
) -> list[ControlRoute]:
    """Return the routes of all endpoints, except those that manage access."""
    return [
        *_subject_routes(database, catalogue),
        *_consumer_routes(database, groups, catalogue),
        *_operation_routes(database, operations),
        ControlRoute(
            endpoints.CREATE_GROUP,
            lambda body, params: starts.create(params["subject"], params["group"], body),
        ),
        ControlRoute(
            endpoints.DELETE_SUBJECT,
            lambda body, params: removals.delete_subject(params["subject"], body),
        ),
        ControlRoute(
            endpoints.DELETE_GROUP,
            lambda body, params: removals.delete_group(params["subject"], params["group"], body),
        ),
        ControlRoute(
            endpoints.HIDE_SUBJECT,
            lambda body, params: publications.hide(params["subject"], body),
        ),
        ControlRoute(
            endpoints.PUBLISH_SUBJECT,
            lambda body, params: publications.publish(params["subject"], body),
        ),
        ControlRoute(endpoints.HEALTH, lambda _body, _: health()),
        *probe_routes(health),
        ControlRoute(
            endpoints.BALANCE,
            lambda _body, params: balancer.plan(
                [name for name in params.get("exclude", "").split(",") if name]
            ),
        ),
        ControlRoute(endpoints.SET_BALANCE, lambda body, _: balancer.change(body)),
        ControlRoute(endpoints.VERIFY, lambda _body, _: verify_cluster(database, network)),
        ControlRoute(
            endpoints.RESET_GROUP,
            lambda body, params: resets.reset(params["subject"], params["group"], body),
        ),
        ControlRoute(
            endpoints.CANCEL_RESET,
            lambda _body, params: resets.cancel(params["subject"], params["group"]),
        ),
    ]


def _subject_routes(database: Database, catalogue: Catalogue) -> list[ControlRoute]:
    async def route(_body: None, params: Params) -> Route:
        if "waiting" in params and is_allowed(Rights.PRODUCE, params["subject"]):
            catalogue.waiting_producers.note(params["subject"], params["waiting"])
        fetch = partial(
            catalogue.wait_for_route,
            params["subject"],
            known_version=whole_number(params, "known_version", -1, low=-1),
            wait_ms=whole_number(params, "wait_ms", 0, high=PULL_WAIT_MS_MAX),
            order_strategy=parse_order_strategy(params),
            subject_id=whole_number(params, "subject_id", 0),
        )
        return await catalogue.retry_while_empty(fetch)

    async def auto_create(body: AutoCreate, params: Params) -> SubjectView:
        create = partial(catalogue.auto_create, params["subject"], body)
        return await catalogue.retry_while_empty(create)

    return [
        ControlRoute(endpoints.BROKER_HEARTBEAT, lambda body, _: catalogue.process_report(body)),
        ControlRoute(
            endpoints.CORDON, lambda body, params: catalogue.cordon(params["group"], body)
        ),
        ControlRoute(
            endpoints.ACCEPT_FOLDER,
            lambda body, params: catalogue.accept_folder(params["group"], body),
        ),
        ControlRoute(
            endpoints.COPY_SET, lambda _body, params: catalogue.read_copies(params["group"])
        ),
        ControlRoute(
            endpoints.SET_COPIES,
            lambda body, params: catalogue.change_copies(set_copies, params["group"], body),
        ),
        ControlRoute(
            endpoints.FORGET_COPY,
            lambda body, params: catalogue.change_copies(forget_copy, params["group"], body),
        ),
        ControlRoute(
            endpoints.CHANGE_COPY_SET,
            lambda body, params: catalogue.change_copies(change_copy_set, params["group"], body),
        ),
        ControlRoute(
            endpoints.PROMOTE_COPY,
            lambda body, params: catalogue.change_copies(promote_copy, params["group"], body),
        ),
        ControlRoute(
            endpoints.TAKE_OVER, lambda body, params: catalogue.take_over(params["group"], body)
        ),
        ControlRoute(
            endpoints.OFFER_PLACE,
            lambda body, params: catalogue.change_copies(offer_place, params["group"], body),
        ),
        ControlRoute(
            endpoints.HAND_OVER, lambda body, params: catalogue.hand_over(params["group"], body)
        ),
        ControlRoute(endpoints.CREATE_SUBJECT, lambda body, _: catalogue.create_subject(body)),
        ControlRoute(endpoints.AUTO_CREATE, auto_create),
        ControlRoute(endpoints.SUBJECTS, lambda _body, _: catalogue.list_subjects()),
        ControlRoute(
            endpoints.SUBJECT, lambda _body, params: catalogue.read_subject(params["subject"])
        ),
        ControlRoute(endpoints.ROUTE, route),
        ControlRoute(
            endpoints.QUEUES, lambda _body, params: database.read(read_queues, params["subject"])
        ),
    ]


def _consumer_routes(
    database: Database, groups: GroupService, catalogue: Catalogue
) -> list[ControlRoute]:
    async def group(_body: None, params: Params) -> GroupView:
        view = await database.read(read_group, params["subject"], params["group"])
        return replace(view, waiting_producers=catalogue.waiting_producers.of(params["subject"]))

    return [
        ControlRoute(
            endpoints.JOIN, lambda body, _: catalogue.retry_while_empty(partial(groups.join, body))
        ),
        ControlRoute(endpoints.HEARTBEAT, lambda body, _: groups.heartbeat(body)),
        ControlRoute(endpoints.RELEASE, lambda body, _: groups.release(body)),
        ControlRoute(endpoints.SUSPEND, lambda body, _: groups.suspend(body)),
        ControlRoute(endpoints.LEAVE, lambda body, _: groups.leave(body)),
        ControlRoute(endpoints.GROUP, group),
        ControlRoute(
            endpoints.GROUPS, lambda _body, params: database.read(list_groups, params["subject"])
        ),
        ControlRoute(
            endpoints.SWITCH_GROUP,
            lambda body, params: groups.switch_strategy(params["subject"], params["group"], body),
        ),
        ControlRoute(
            endpoints.GROUP_SETTINGS,
            lambda _body, params: database.read(group_settings, params["subject"], params["group"]),
        ),
        ControlRoute(
            endpoints.SET_GROUP,
            lambda body, params: groups.set_policy(params["subject"], params["group"], body),
        ),
        ControlRoute(
            endpoints.SUSPEND_GROUP,
            lambda body, params: groups.suspend_members(params["subject"], params["group"], body),
        ),
    ]


def _operation_routes(database: Database, operations: OperationDriver) -> list[ControlRoute]:
    return [
        ControlRoute(endpoints.RESHAPE, lambda body, _: operations.begin(body)),
        ControlRoute(
            endpoints.SET_SUBJECT,
            lambda body, params: operations.set_subject(params["subject"], body),
        ),
        ControlRoute(
            endpoints.CANCEL_OPERATION,
            lambda _body, params: operations.cancel(whole_number(params, "id", 0)),
        ),
        ControlRoute(
            endpoints.OPERATIONS,
            lambda _body, params: operations.list_operations(params["subject"]),
        ),
        ControlRoute(endpoints.WAITING_OPERATIONS, lambda _body, _: operations.list_waiting()),
        ControlRoute(
            endpoints.HISTORY,
            lambda _body, params: database.read(subject_history, params["subject"]),
        ),
    ]


def parse_order_strategy(params: Params) -> OrderStrategy | None:
    """Return the order strategy in the query string, or None. Raises InvalidRequestError."""
    text = params.get("order_strategy")
    try:
        return None if text is None else OrderStrategy(text)
    except ValueError:
        allowed = ", ".join(OrderStrategy)
        raise InvalidRequestError(f"order_strategy is one of {allowed}, not {text!r:.40}") from None
