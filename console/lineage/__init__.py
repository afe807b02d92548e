"""The lineage of a subject as a picture: which partition had which messages when, and how far each
consumer group has read.
"""

from .facts import LineageFacts
from .fetching import fetch_lineage
from .look import STYLE
from .picture import draw_lineage

__all__ = ["STYLE", "LineageFacts", "draw_lineage", "fetch_lineage"]
