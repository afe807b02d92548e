"""The leases that were granted and released: the metaserver's part of a history. Pure."""

from __future__ import annotations

from collections import defaultdict

from .findings import Findings


class Ownership:
    """Judges grants and releases in the order of time."""

    def __init__(self, findings: Findings) -> None:
        self._note = findings.note
        self._group_of: dict[str, int] = {}
        self._granted: dict[tuple[int, int], int] = {}
        """Newest token by (group, partition)."""
        self._sessions: dict[tuple[int, int, int], str] = {}
        """Session by (group, partition, token)."""
        self._released: set[tuple[str, int, int]] = set()
        self._running: defaultdict[str, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)
        """Token and its partition under which a running handler began, by session and then by
        (partition, offset).
        """
        self._holding: dict[str, tuple[tuple[int, int], ...]] = {}
        self._replaced: set[str] = set()
        self._begun_in_time: set[tuple[str, int, int]] = set()
        """(session, partition, token) under which a handler began before the next grant."""

    def granted(
        self,
        group_id: int,
        partition_id: int,
        token: int,
        session: str,
        holder: str,
        holder_left_ms: int,
    ) -> None:
        """See `events.Granted`."""
        self._group_of[session] = group_id
        where = f"partition {partition_id}, token {token} for {session[:8]}"
        before = self._granted.get((group_id, partition_id), 0)
        if token <= before:
            self._note("duplicate token", f"{where}, not above an earlier one")
        if self._sessions.setdefault((group_id, partition_id, token), session) != session:
            self._note("duplicate token", f"{where} and another session")
        if holder_left_ms > 0 and holder != session and not self._is_free(holder, partition_id):
            self._note("two grants", f"{where}, while {holder[:8]} has {holder_left_ms} ms left")
        self._granted[group_id, partition_id] = max(token, before)

    def _is_free(self, holder: str, partition_id: int) -> bool:
        if (holder, 0, 0) in self._released:
            return True
        token = self._token(holder, partition_id)
        if (holder, partition_id, token) in self._released:
            return True
        reported = self._holding.get(holder)
        return reported is not None and (partition_id, token) not in reported

    def _token(self, session: str, partition_id: int) -> int:
        """Return the newest token of a session's group on a partition."""
        return self._granted.get((self._group_of.get(session, 0), partition_id), 0)

    def released(self, session: str, partition_id: int, token: int) -> None:
        """See `events.LetGo`; a repeated release of an older token releases nothing newer."""
        self._released.add((session, partition_id, token))
        for (running_id, offset), (under, home) in sorted(self._running[session].items()):
            if not partition_id or (partition_id == home and token >= under):
                where = f"{running_id}/{offset}"
                self._note(
                    "two grants", f"{session[:8]} releases {where} while it is handled ({token})"
                )

    def holds(self, session: str, holding: tuple[tuple[int, int], ...]) -> None:
        """See `events.Holds`."""
        self._holding[session] = holding

    def replaced(self, session: str) -> None:
        """See `events.Replaced`."""
        self._replaced.add(session)

    def is_replaced(self, session: str) -> bool:
        """Return whether a process with this session's instance name was started, so that its
        handlers may be late.
        """
        return session in self._replaced

    def begun(
        self,
        session: str,
        partition_id: int,
        offset: int,
        token: int,
        home: int,
        *,
        ours: bool,
        with_earlier: bool = False,
    ) -> None:
        """
        Note that a handler began under the token of the partition `home`, which differs from
        `partition_id` for a parked message of an ancestor.

        A program that got several messages of a key together, before the next grant, may continue
        with the later ones after it; as with a handler that is still running, the fence refuses its
        acks.
        """
        granted, under = self._token(session, home), (session, home, token)
        if token >= granted:
            self._begun_in_time.add(under)
        elif session not in self._replaced and not (with_earlier and under in self._begun_in_time):
            self._note(
                "two grants",
                f"{partition_id}/{offset} begun under token {token} after {granted} was granted",
            )
        if home != partition_id:
            self._check_alone(session, partition_id, offset)
        if ours:
            self._running[session][partition_id, offset] = token, home

    def _check_alone(self, session: str, partition_id: int, offset: int) -> None:
        """Check that no owner that still has its lease is handling a parked message which a child
        has taken over.
        """
        for other, running in self._running.items():
            under, home = running.get((partition_id, offset), (0, 0))
            if other in {session, *self._replaced}:
                continue
            if under and under == self._token(other, home):
                self._note(
                    "two grants",
                    f"{partition_id}/{offset} begun by {session[:8]}, while {other[:8]} "
                    f"handles it under token {under} of {home}",
                )

    def dropped(self, session: str, partition_id: int, offset: int) -> None:
        """See `events.Dropped`."""
        running = self._running.get(session)
        if running is not None:
            running.pop((partition_id, offset), None)
