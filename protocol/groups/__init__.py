"""The stored settings of a consumer group: its start, its failure policy and its suspension.
Pure.
"""

from .settings import *  # noqa: F403 - a reader looks here first
