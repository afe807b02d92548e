"""Checks the grants and releases of the metaserver's leases in a history. Pure."""

from __future__ import annotations

from collections import defaultdict

from .findings import Findings


class Ownership:
    """Checks grants, releases, and the handlers that run under them, in chronological order."""

    def __init__(self, findings: Findings) -> None:
        self._note = findings.note
        self._group_ids: dict[str, int] = {}
        self._newest_tokens: dict[tuple[int, int], int] = {}
        """Maps (group, partition) to the newest token."""
        self._sessions: dict[tuple[int, int, int], str] = {}
        """Maps (group, partition, token) to the session."""
        self._released_leases: set[tuple[str, int, int]] = set()
        self._running_handlers: defaultdict[str, dict[tuple[int, int], tuple[int, int]]] = (
            defaultdict(dict)
        )
        """Maps each session to its running handlers: (partition, offset) to (token, partition of
        the lease).
        """
        self._reported_leases: dict[str, tuple[tuple[int, int], ...]] = {}
        self._replaced_sessions: set[str] = set()
        self._begun_before_next_grant: set[tuple[str, int, int]] = set()
        """The (session, partition, token) under which a handler was started before the next
        grant.
        """

    def on_granted(
        self,
        group_id: int,
        partition_id: int,
        token: int,
        session: str,
        holder: str,
        holder_left_ms: int,
    ) -> None:
        """See `events.Granted`."""
        self._group_ids[session] = group_id
        grant = f"partition {partition_id}, token {token} for {session[:8]}"
        previous = self._newest_tokens.get((group_id, partition_id), 0)
        if token <= previous:
            self._note("duplicate token", f"{grant}, not above an earlier one")
        if self._sessions.setdefault((group_id, partition_id, token), session) != session:
            self._note("duplicate token", f"{grant}, and for another session")
        if (
            holder_left_ms > 0
            and holder != session
            and not self._has_released(holder, partition_id)
        ):
            self._note("two grants", f"{grant}, while {holder[:8]} has {holder_left_ms} ms left")
        self._newest_tokens[group_id, partition_id] = max(token, previous)

    def _has_released(self, holder: str, partition_id: int) -> bool:
        """Return True if a session has released its lease on a partition, or its last report listed
        only other leases.
        """
        if (holder, 0, 0) in self._released_leases:
            return True
        token = self._newest_token(holder, partition_id)
        if (holder, partition_id, token) in self._released_leases:
            return True
        reported_leases = self._reported_leases.get(holder)
        return reported_leases is not None and (partition_id, token) not in reported_leases

    def _newest_token(self, session: str, partition_id: int) -> int:
        """Return the newest token of a session's group on a partition."""
        return self._newest_tokens.get((self._group_ids.get(session, 0), partition_id), 0)

    def on_released(self, session: str, partition_id: int, token: int) -> None:
        """See `events.LeaseReleased`. Releasing an older token again does not release a newer
        lease.
        """
        self._released_leases.add((session, partition_id, token))
        for (running_id, offset), (running_token, leased_id) in sorted(
            self._running_handlers[session].items()
        ):
            if not partition_id or (partition_id == leased_id and token >= running_token):
                message = f"{running_id}/{offset}"
                self._note(
                    "two grants", f"{session[:8]} releases {message} while it is handled ({token})"
                )

    def on_leases_reported(self, session: str, holding: tuple[tuple[int, int], ...]) -> None:
        """See `events.LeasesReported`."""
        self._reported_leases[session] = holding

    def on_replaced(self, session: str) -> None:
        """See `events.Replaced`."""
        self._replaced_sessions.add(session)

    def is_replaced(self, session: str) -> bool:
        """Return True if a newer process has taken over this session's instance name. Its handlers
        may then start late.
        """
        return session in self._replaced_sessions

    def on_started(
        self,
        session: str,
        partition_id: int,
        offset: int,
        token: int,
        leased_id: int,
        *,
        ours: bool,
        with_earlier: bool = False,
        let_in: int | None = None,
    ) -> None:
        """
        Check the lease under which a handler was started. `leased_id` is the leased partition. It
        differs from `partition_id` for a parked message that was adopted from an ancestor.

        A program that received several messages of a key in one batch before the next grant may
        continue with them afterwards. Its acks are refused by the fence, like those of a handler
        that is still running. `let_in` is the newest token that the broker has let in, if the
        owner relies on the broker's promise; None: it relies on its lease.
        """
        granted, lease = self._newest_token(session, leased_id), (session, leased_id, token)
        if let_in is not None:
            granted = let_in
        if token >= granted:
            self._begun_before_next_grant.add(lease)
        elif session not in self._replaced_sessions and not (
            with_earlier and lease in self._begun_before_next_grant
        ):
            self._note(
                "two grants",
                f"{partition_id}/{offset} begun under token {token} after {granted} was granted",
            )
        if leased_id != partition_id:
            self._check_sole_handler(session, partition_id, offset)
        if ours:
            self._running_handlers[session][partition_id, offset] = token, leased_id

    def _check_sole_handler(self, session: str, partition_id: int, offset: int) -> None:
        """Check that a parked message that a child has adopted is not still being handled by
        another owner with a valid lease.
        """
        for other, running in self._running_handlers.items():
            token, leased_id = running.get((partition_id, offset), (0, 0))
            if other in {session, *self._replaced_sessions}:
                continue
            if token and token == self._newest_token(other, leased_id):
                self._note(
                    "two grants",
                    f"{partition_id}/{offset} begun by {session[:8]}, while {other[:8]} "
                    f"handles it under token {token} of {leased_id}",
                )

    def on_dropped(self, session: str, partition_id: int, offset: int) -> None:
        """See `events.Dropped`."""
        running = self._running_handlers.get(session)
        if running is not None:
            running.pop((partition_id, offset), None)
