"""Messages that a consumer group has set aside: their changes, and views of them. Pure."""

from .changes import *  # noqa: F403 - a reader looks here first
from .views import *  # noqa: F403 - as above  # noqa: F403 - as above
