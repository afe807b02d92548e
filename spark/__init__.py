"""A Python data source for Spark that reads and writes subjects, and a local Spark session."""

from ..protocol.errors import MissingExtraError

try:
    from .order import ordered as ordered
    from .ranges import read_ranges as read_ranges
    from .registration import register as register
    from .session import local_session as local_session
    from .streaming.lag import StreamLag as StreamLag
except ModuleNotFoundError as error:
    raise MissingExtraError.of(error, "keylane.spark", "spark") from error
