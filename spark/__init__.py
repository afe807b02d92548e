"""Spark reads and writes keylane: a Python data source, and what a local session needs."""

from .order import ordered as ordered
from .ranges import read_ranges as read_ranges
from .registration import register as register
from .session import local_session as local_session
from .streaming.lag import StreamLag as StreamLag
