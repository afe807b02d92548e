"""Grants of the metaservers on a PostgreSQL, noted by a trigger in the transactions that make
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from keylane.checker.events import Granted

TABLE = """
CREATE TABLE proof_grants (
    number BIGSERIAL PRIMARY KEY, at_us BIGINT, group_id BIGINT, partition_id BIGINT, token BIGINT,
    session TEXT, holder TEXT, holder_left_ms BIGINT
)
"""
FUNCTION = """
CREATE FUNCTION note_grant() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    now_us BIGINT := EXTRACT(EPOCH FROM clock_timestamp()) * 1000000;
    holder TEXT := '';
    until_ms BIGINT;
BEGIN
    IF NEW.session IS NULL THEN RETURN NULL; END IF;
    IF TG_OP = 'UPDATE' THEN
        IF OLD.session = NEW.session AND OLD.token = NEW.token THEN RETURN NULL; END IF;
        holder := COALESCE(OLD.session, '');
    END IF;
    SELECT expires_at INTO until_ms FROM sessions WHERE sessions.session = holder;
    INSERT INTO proof_grants (at_us, group_id, partition_id, token, session, holder, holder_left_ms) VALUES (
        now_us, NEW.group_id, NEW.partition_id, NEW.token, NEW.session, holder,
        GREATEST(0, COALESCE(until_ms - now_us / 1000, 0))
    );
    RETURN NULL;
END $$
"""
TRIGGER = """
CREATE TRIGGER note_grants AFTER INSERT OR UPDATE ON leases FOR EACH ROW EXECUTE FUNCTION note_grant()
"""


def read_grants(execute: Any) -> Iterator[tuple[int, Granted]]:
    """What was granted, at instants of the boot clock; `execute` runs a statement on the database
    of the metaservers.
    """
    ahead_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    names = "at_us, group_id, partition_id, token, session, holder, holder_left_ms"
    for row in execute(f"SELECT {names} FROM proof_grants ORDER BY number"):
        at_us, *fields = row
        yield at_us * 1_000 - ahead_ns, Granted(*fields)
