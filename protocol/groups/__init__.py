"""The stored settings of a consumer group: where it began, its failure policy, and whether an
operator suspends it. Pure.
"""

from .settings import *  # noqa: F403 - a reader looks here first
