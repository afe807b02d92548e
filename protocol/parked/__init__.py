"""The parked messages of a consumer group: changes to them, and views of them. Pure."""

from .changes import *  # noqa: F403 - a reader looks here first
from .views import *  # noqa: F403 - as above
