"""Spark reads and writes keylane: a Python data source, and what a local session needs."""

from .order import ordered as ordered
from .registration import register as register
from .session import local_session as local_session
