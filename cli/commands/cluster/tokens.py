"""The first tokens of a new cluster: the administrator's, and one for each broker; metaservers get
their hashes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ....protocol.access.tokens import make_token, token_hash

BROKER_FILE = "broker.token"
"""Beside a host's settings: the token of its broker."""


class ClusterTokens:
    """
    Tokens made anew; `admin` is shown once and written nowhere.

    Args:
        brokers: names of the broker groups.
    """

    def __init__(self, brokers: Sequence[str]) -> None:
        self.admin = make_token(secrets.randbits)
        self.of_broker = {name: make_token(secrets.randbits) for name in brokers}

    @property
    def for_metaservers(self) -> dict[str, object]:
        """Settings of a metaserver."""
        hashes = [f"{name}:{token_hash(token)}" for name, token in self.of_broker.items()]
        return {
            "access": "on",
            "admin_token_hash": token_hash(self.admin),
            "broker_token_hashes": hashes,
        }

    @property
    def for_brokers(self) -> dict[str, object]:
        """Settings of a broker."""
        return {"access": "on", "token_file": BROKER_FILE}
