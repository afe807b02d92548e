"""Makes the pages of the site that follow from the code: the first page from README.md, the API,
the settings, the errors, and the commands. MkDocs calls `on_files` and `on_page_markdown`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from keylane import errors
from keylane.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*)\)")
"""A link to a file of the repository that is no page."""
CLIENTS = {
    "producer": ("Producer", "ProducerSettings", "Receipt", "TableReceipt", "ScheduledReceipt"),
    "consumer": ("Consumer", "ConsumerSettings", "Message", "Lease", "Retry", "ArrowBatch"),
    "reader": ("Reader", "QueueReader", "Position"),
    "admin": ("Admin",),
    "codecs": ("Codec", "JsonCodec", "TextCodec", "PydanticCodec"),
    "sync": ("sync.Producer", "sync.Consumer"),
    "outbox": ("outbox.Outbox",),
    "sink": ("sink.FencedSession",),
}
"""The pages of the API, and the names that each describes."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that follow from the code."""
    made = {
        "index.md": first_page(),
        "reference/errors.md": "\n".join(error_lines()),
        "reference/commands.md": "\n".join(command_lines()),
        **{f"reference/{page}.md": api_page(page, names) for page, names in CLIENTS.items()},
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the text of links to files that are no pages."""
    return OUTSIDE.sub(r"\1", markdown)


def first_page() -> str:
    """Return README.md as a page of the docs folder: links to other files keep only their text."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/([^)]*)\)", r"](./\1)", text).replace(
        "(./decisions/)", "(./decisions/README.md)"
    )
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|\./[\w/]+\.md)[^)]*\)", r"\1", text)
    return text.replace("](./", "](")


def api_page(page: str, names: Iterable[str]) -> str:
    """Return a page of the API: each name with its own documentation."""
    title = page if page in {"sync", "outbox", "sink"} else page.capitalize()
    return "\n\n".join([f"# {title}", *(f"::: {path_of(name)}" for name in names)])


def path_of(name: str) -> str:
    """Return the module and name where `keylane.NAME` is defined."""
    module, _, last = f"keylane.{name}".rpartition(".")
    found = getattr(__import__(module, fromlist=[last]), last)
    if not inspect.isclass(found):
        raise ValueError(f"{name} is not a class")
    return f"{found.__module__}.{found.__qualname__}"


def error_lines() -> Iterator[str]:
    """Yield a section for each class of errors, with a row for each of its reasons."""
    yield "# Errors"
    yield ""
    yield "Every error has a code that never changes its meaning. `fate` says whether the call took"
    yield "effect: `not_done`, or `unknown`, if it may have been done."
    rows: dict[str, list[errors.Reason]] = {}
    for reason in errors.Reason:
        rows.setdefault(reason.kind, []).append(reason)
    for name in sorted(vars(errors)):
        kind = vars(errors)[name]
        if not (inspect.isclass(kind) and issubclass(kind, errors.KeylaneError)):
            continue
        yield f"\n## {name}\n"
        yield inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        yield ""
        yield "| code | reason | what happened | fate | what to do |"
        yield "| --- | --- | --- | --- | --- |"
        own = kind.__dict__.get("code")
        if own is not None:
            yield f"| {own} | | {cell(kind.summary)} | {kind.fate.value} | {cell(kind.hint)} |"
        for each in sorted(rows.get(name, []), key=lambda reason: reason.code):
            what = f"{cell(each.summary)} | {each.fate.value} | {cell(each.hint)}"
            yield f"| {each.code} | `{each.name}` | {what} |"


def cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def command_lines() -> Iterator[str]:
    """Yield a section for each command, with its arguments and options."""
    yield "# Commands"
    yield from _commands(typer.main.get_command(app), None, "keylane")


def _commands(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    if names:
        for each in names:
            yield from _commands(command.get_command(context, each), context, f"{name} {each}")
        return
    yield f"\n## {name}\n"
    yield cell(command.help or "")
    rows = [row for row in map(_parameter, command.params) if row]
    if rows:
        yield "\n| | default | |\n| --- | --- | --- |"
        yield from rows


def _parameter(parameter: Any) -> str:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return ""
    default = parameter.default
    shown = "" if default is None or callable(default) or default == () else f"`{default}`"
    words = ", ".join(f"`{each}`" for each in parameter.opts)
    return f"| {words} | {shown} | {cell(getattr(parameter, 'help', '') or '')} |"
