"""Which messages a page of the console shows."""

from keylane.console.views.messages import SHOWN_MAX, _newest
from keylane.protocol.message import Message


def test_newest_messages_are_shown_when_all_were_sent_at_one_time() -> None:
    """A producer reads its clock once for a batch; the page showed the oldest ones of it."""
    found = [Message("s", b"k", b"v", offset, 1, sent_at_ns=7) for offset in range(200)]
    newest = [each.offset for each in _newest(found)]
    assert newest == list(range(199, 199 - SHOWN_MAX, -1))
