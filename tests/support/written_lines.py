"""Read the lines that another process appends to a file while it still writes."""

from pathlib import Path


def written_lines(path: Path) -> list[str]:
    """The whole lines of `path`, none if it does not exist yet; a line without its end is still
    being written.
    """
    if not path.exists():
        return []
    return path.read_text().split("\n")[:-1]
