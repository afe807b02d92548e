"""Creates hidden subjects and publishes them. Does network I/O and runs SQL.

hide ─▶ planned ─▶ hosted, open ─▶ perhaps a cut: an operation ─▶ filled by clients ─▶ publish
     ─▶ an operation; without a target only a new name
"""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.control import SubjectView
from ...protocol.ids import Subject
from ...protocol.operations import HideSubject, Publication, PublishSubject
from ..catalogue.service import Catalogue
from ..operations.driver import OperationDriver
from ..settings import MetaserverSettings
from ..sql.database import Database
from .cuts import begin_cut
from .hiding import plan_hidden
from .publishing import begin_publication


class PublicationService:
    """
    Creates and publishes the hidden subjects of one database.

    Args:
        after_step: called with the name of each finished step: hidden (a hidden subject is
            planned), cut (its cut is journaled), published (a publication is journaled).
    """

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        *,
        catalogue: Catalogue,
        operations: OperationDriver,
        after_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._catalogue = catalogue
        self._operations = operations
        self._after_step = after_step

    async def hide(self, target: str, request: HideSubject) -> SubjectView:
        """
        Create a hidden subject and host its partitions. Repeating the call continues an interrupted
        one. Does not wait for the cut.

        Raises:
            KeylaneError: any error of `plan_hidden`, `Catalogue.complete_creation` or `begin_cut`.
        """
        row = await self._database.write(
            plan_hidden,
            target,
            request,
            subjects_max=self._settings.subjects_max,
            limited=self._settings.is_guarded,
        )
        self._after_step("hidden")
        if row.route_version == 0:
            await self._catalogue.complete_creation(row)
        if request.cut:
            await self._begin_cut(target, request)
        return await self._catalogue.read_subject(request.hidden)

    async def _begin_cut(self, target: str, request: HideSubject) -> None:
        """Begin the cut for a hidden subject and start driving it."""
        operation_id = await self._database.write(
            begin_cut,
            request.hidden,
            target,
            driver=self._operations.driver_id,
            lease_ms=self._settings.operation_lease_ms,
        )
        self._after_step("cut")
        if operation_id:
            await self._operations.drive(operation_id)

    async def publish(self, hidden_subject: str, request: PublishSubject) -> Publication:
        """
        Publish a hidden subject, or report the progress of its publication. Does not wait for the
        operation.

        Raises:
            KeylaneError: any error of `begin_publication`; nothing was changed.
        """
        operation_id = await self._database.write(
            begin_publication,
            hidden_subject,
            request,
            driver=self._operations.driver_id,
            lease_ms=self._settings.operation_lease_ms,
        )
        self._after_step("published")
        self._catalogue.wake_route_waiters([Subject(hidden_subject), Subject(request.target)])
        if not operation_id:
            return Publication(hidden=hidden_subject, target=request.target)
        view = await self._operations.drive(operation_id)
        if view is None:
            return Publication(hidden=hidden_subject, target=request.target)
        return Publication(
            hidden=hidden_subject,
            target=request.target,
            operation_id=operation_id,
            state=view.state,
            problem=view.problem,
        )
