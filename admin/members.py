"""An admin's call about the cluster itself: its members and their versions."""

from __future__ import annotations

import msgspec

from ..protocol.errors import ForeignServerError
from ..protocol.membership.cluster_view import ClusterView
from .calls import ClusterCalls


class MemberCalls(ClusterCalls):
    """The part of an admin that is about the cluster itself."""

    async def describe_cluster(self) -> ClusterView:
        """
        Return the cluster's name, its version, and the version of each member.

        Raises:
            ForeignServerError: the answer is none of a metaserver.
        """
        details = (await self._meta.health()).details
        try:
            return msgspec.convert(details["cluster"], ClusterView)
        except (KeyError, msgspec.ValidationError) as error:
            raise ForeignServerError("the metaserver does not tell versions") from error
