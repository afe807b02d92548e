"""The token that the reader makes is the one with which the metaserver was started."""

import os
from pathlib import Path

REFUSED = {"keylane access token revoke 3": "3"}


def before_command(text: str) -> None:
    if text.startswith("keylane access token create"):
        Path("admin.token").write_text(Path(os.environ["KEYLANE_TOKEN_FILE"]).read_text())
