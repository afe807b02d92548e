"""keylane: messages of one order key keep their order.

The public face: the clients, what their signatures name, and the errors that programs catch; `keylane.errors` has all
errors.  Names are loaded when they are first used, so importing keylane starts nothing and imports no network library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import errors as errors
    from .admin import (
        Admin,
        BrokerList,
        BrokerView,
        GroupDescription,
        GroupReset,
        GroupSummary,
        GroupView,
        Health,
        OperationList,
        OperationView,
        RefusedBroker,
        ResetTo,
        Retention,
        SubjectDescription,
        SubjectHistory,
        SubjectSummary,
        SubjectView,
        Verification,
    )
    from .consumer import (
        Assignment,
        Consumer,
        ConsumerSettings,
        Handler,
        QueueProgress,
        QueueReader,
        QueueSlice,
    )
    from .producer import Producer, ProducerSettings, ProducerStats, SendFuture
    from .protocol.backoff import Backoff
    from .protocol.control import TimeBound
    from .protocol.errors import (
        AcceptedAsLostError,
        AlreadyOpenError,
        ClosedError,
        ConfigError,
        DeliveryError,
        DeliveryTimeoutError,
        Fate,
        FencedError,
        ForkedError,
        GivenUpError,
        HandlerTypeError,
        InvalidNameError,
        JavaMissingError,
        KeyHaltedError,
        KeylaneError,
        LeaseLostError,
        MessageTooLargeError,
        NotSentError,
        OffsetOutOfRangeError,
        OtherLoopError,
        OutcomeUnknownError,
        OverloadedError,
        PartlyQueuedError,
        QueueFullError,
        QueueUnknownError,
        RefusedError,
        Retry,
        RowsGivenUpError,
        RowsRefusedError,
        StorageError,
        StrategyMismatchError,
        SubjectExistsError,
        SubjectNotStaticError,
        SubjectUnknownError,
        UnreachableError,
        WorkerCancelledError,
    )
    from .protocol.message import Message, Receipt
    from .protocol.queues import QueueView
    from .protocol.routing import ConsumeStrategy, OrderStrategy

__version__ = "0.1.0"

__all__ = [
    "AcceptedAsLostError",
    "Admin",
    "AlreadyOpenError",
    "Assignment",
    "Backoff",
    "BrokerList",
    "BrokerView",
    "ClosedError",
    "ConfigError",
    "ConsumeStrategy",
    "Consumer",
    "ConsumerSettings",
    "DeliveryError",
    "DeliveryTimeoutError",
    "Fate",
    "FencedError",
    "ForkedError",
    "GivenUpError",
    "GroupDescription",
    "GroupReset",
    "GroupSummary",
    "GroupView",
    "Handler",
    "HandlerTypeError",
    "Health",
    "InvalidNameError",
    "JavaMissingError",
    "KeyHaltedError",
    "KeylaneError",
    "LeaseLostError",
    "Message",
    "MessageTooLargeError",
    "NotSentError",
    "OffsetOutOfRangeError",
    "OperationList",
    "OperationView",
    "OrderStrategy",
    "OtherLoopError",
    "OutcomeUnknownError",
    "OverloadedError",
    "PartlyQueuedError",
    "Producer",
    "ProducerSettings",
    "ProducerStats",
    "QueueFullError",
    "QueueProgress",
    "QueueReader",
    "QueueSlice",
    "QueueUnknownError",
    "QueueView",
    "Receipt",
    "RefusedBroker",
    "RefusedError",
    "ResetTo",
    "Retention",
    "Retry",
    "RowsGivenUpError",
    "RowsRefusedError",
    "SendFuture",
    "StorageError",
    "StrategyMismatchError",
    "SubjectDescription",
    "SubjectExistsError",
    "SubjectHistory",
    "SubjectNotStaticError",
    "SubjectSummary",
    "SubjectUnknownError",
    "SubjectView",
    "TimeBound",
    "UnreachableError",
    "Verification",
    "WorkerCancelledError",
]

_HOMES = {
    ".admin": (
        "Admin",
        "BrokerList",
        "BrokerView",
        "GroupDescription",
        "GroupReset",
        "GroupSummary",
        "GroupView",
        "Health",
        "OperationList",
        "OperationView",
        "RefusedBroker",
        "ResetTo",
        "Retention",
        "SubjectDescription",
        "SubjectHistory",
        "SubjectSummary",
        "SubjectView",
        "Verification",
    ),
    ".consumer": (
        "Assignment",
        "Consumer",
        "ConsumerSettings",
        "Handler",
        "QueueProgress",
        "QueueReader",
        "QueueSlice",
    ),
    ".producer": ("Producer", "ProducerSettings", "ProducerStats", "SendFuture"),
    ".protocol.backoff": ("Backoff",),
    ".protocol.control": ("TimeBound",),
    ".protocol.message": ("Message", "Receipt"),
    ".protocol.queues": ("QueueView",),
    ".protocol.routing": ("ConsumeStrategy", "OrderStrategy"),
}
"""Where a name that is no error comes from."""

if not TYPE_CHECKING:  # for a type checker a name that is not above is an error

    def __getattr__(name: str) -> object:
        if name == "errors":
            return import_module(".errors", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = next((home for home, names in _HOMES.items() if name in names), ".protocol.errors")
        value = getattr(import_module(home, __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
