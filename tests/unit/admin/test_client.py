"""The admin client stops following an operation where the metaserver's table says that the route has changed."""

from keylane.admin.client import ROUTE_SETTLED
from keylane.metaserver.operations.states import RULES


def test_operation_is_followed_until_it_no_longer_runs():
    assert {state for state, rule in RULES.items() if not rule.runs} == ROUTE_SETTLED
