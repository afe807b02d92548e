"""Generates the API pages of the site. Nothing here needs MkDocs; mkdocstrings fills the pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

API_PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "producer": (
        "Producer",
        (
            "keylane.Producer",
            "keylane.ProducerSettings",
            "keylane.Receipt",
            "keylane.TableReceipt",
            "keylane.ScheduledReceipt",
            "keylane.producer.*",
        ),
    ),
    "consumer": (
        "Consumer",
        (
            "keylane.Consumer",
            "keylane.ConsumerSettings",
            "keylane.Message",
            "keylane.Lease",
            "keylane.Retry",
            "keylane.NACK",
            "keylane.ArrowBatch",
            "keylane.consumer.*",
        ),
    ),
    "reader": (
        "Reader",
        (
            "keylane.Reader",
            "keylane.QueueReader",
            "keylane.Position",
            "keylane.consumer.QueueProgress",
            "keylane.consumer.QueueSlice",
        ),
    ),
    "admin": ("Admin", ("keylane.Admin",)),
    "admin_results": ("What Admin returns", ("keylane.admin.*",)),
    "codecs": (
        "Codecs",
        ("keylane.Codec", "keylane.JsonCodec", "keylane.TextCodec", "keylane.PydanticCodec"),
    ),
    "sync": (
        "keylane.sync",
        ("keylane.sync.Producer", "keylane.sync.Consumer", "keylane.sync.*"),
    ),
    "outbox": (
        "keylane.outbox",
        ("keylane.outbox.Outbox", "keylane.outbox.OutboxSettings", "keylane.outbox.*"),
    ),
    "sink": ("keylane.sink", ("keylane.sink.FencedSession", "keylane.sink.*")),
    "otel": ("keylane.otel", ("keylane.otel.*",)),
    "testing": (
        "keylane.testing",
        ("keylane.testing.VirtualCluster", "keylane.testing.run", "keylane.testing.*"),
    ),
    "arrow": ("keylane.arrow", ("keylane.arrow.*",)),
    "spark": ("keylane.spark", ("keylane.spark.*",)),
    "common": ("Common to all clients", ("keylane.*",)),
}
"""The title of each API page, and the names that it documents. `MODULE.*` stands for those public
names of a module that no page has by name and no earlier page has.
"""


def public_names(module: str) -> list[str]:
    """Return the public names of a module, without its errors: these have a page of their own."""
    loaded = import_module(module)
    listed = getattr(loaded, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, value in vars(loaded).items()
            if not name.startswith("_") and not inspect.ismodule(value)
        ]
    return [name for name in listed if not _is_error(getattr(loaded, name))]


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def target_of(path: str) -> object:
    """Return what a path such as `keylane.sink.fenced` names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def api_names() -> dict[str, list[str]]:
    """Return the paths that each API page documents, with `MODULE.*` replaced by names."""
    listed = [path for _, paths in API_PAGES.values() for path in paths if not path.endswith("*")]
    shown = {id(target_of(path)) for path in listed}
    found: dict[str, list[str]] = {}
    for page, (_, paths) in API_PAGES.items():
        found[page] = []
        for path in paths:
            module = path.removesuffix(".*")
            if path == module:
                found[page].append(path)
                continue
            for name in sorted(public_names(module)):
                target = target_of(f"{module}.{name}")
                if id(target) not in shown:
                    shown.add(id(target))
                    found[page].append(f"{module}.{name}")
    return found


def api_lines(page: str) -> Iterator[str]:
    """Yield the lines of an API page."""
    title, _ = API_PAGES[page]
    yield f"# {title}"
    for path in api_names()[page]:
        yield ""
        yield f"::: {documented_path(path)}"


def documented_path(path: str) -> str:
    """Return the module and name under which a class or function is defined; other values keep
    their path.
    """
    target = target_of(path)
    if inspect.isclass(target) or inspect.isfunction(target):
        return f"{target.__module__}.{target.__qualname__}"
    return path
