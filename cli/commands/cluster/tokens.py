"""The first tokens of a new cluster: one for the administrator and one for each broker; metaservers
get only the hashes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ....protocol.access.tokens import make_token, token_hash

BROKER_FILE = "broker.token"
"""Name of the file with the token of a host's broker, next to the settings."""


class ClusterTokens:
    """
    New tokens; that of `admin` is shown once, and never written.

    Args:
        brokers: names of the broker groups.
    """

    def __init__(self, brokers: Sequence[str]) -> None:
        self.admin = make_token(secrets.randbits)
        self.of_broker = {name: make_token(secrets.randbits) for name in brokers}

    @property
    def for_metaservers(self) -> dict[str, object]:
        """The settings of a metaserver that concern access."""
        hashes = [f"{name}:{token_hash(token)}" for name, token in self.of_broker.items()]
        return {
            "access": "on",
            "admin_token_hash": token_hash(self.admin),
            "broker_token_hashes": hashes,
        }

    @property
    def for_brokers(self) -> dict[str, object]:
        """The settings of a broker that concern access."""
        return {"access": "on", "token_file": BROKER_FILE}
