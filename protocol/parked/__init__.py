"""Parked messages of a consumer group: their changes, and views of them. Pure."""

from .changes import *  # noqa: F403 - a reader looks here first
from .views import *  # noqa: F403 - as above
