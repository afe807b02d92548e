"""Adds pages to the site: the errors and the commands, made from the code, those of api.py and
servers.py, and the files outside docs/ that links.py finds. MkDocs calls `on_config`,
`on_files` and `on_page_markdown`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from links import HOMES, outside_files, site_name, site_text
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from servers import http_lines, limit_lines, metric_lines, setting_lines, table_cell

from api import API_PAGES, api_lines
from keylane import errors
from keylane.cli.main import app

ROOT = Path(__file__).resolve().parents[2]


def on_config(config: MkDocsConfig) -> None:
    """Make a folder that has the package and nothing else, for mkdocstrings: the checkout has
    `.venv` too, and in it a link to the checkout, which it would follow again and again.
    """
    package = ROOT / "build" / "api" / "keylane"
    package.mkdir(parents=True, exist_ok=True)
    folders = [path.parent for path in ROOT.glob("*/__init__.py")]
    for path in [*folders, *ROOT.glob("*.py"), *ROOT.glob("*.pyi")]:
        link = package / path.name
        if not link.is_symlink():
            link.symlink_to(path)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    pages = {
        **{site_name(file): (ROOT / file).read_text() for file in (*HOMES, *outside_files())},
        "reference/errors.md": "\n".join(error_lines()),
        "reference/commands.md": "\n".join(command_lines()),
        "reference/settings.md": "\n".join(setting_lines()),
        "reference/metrics.md": "\n".join(metric_lines()),
        "reference/http.md": "\n".join(http_lines()),
        "reference/limits.md": "\n".join(limit_lines()),
        **{f"reference/{page}.md": "\n".join(api_lines(page)) for page in API_PAGES},
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files of the repository with links within the site."""
    return site_text(page.file.src_uri, markdown)


def error_lines() -> Iterator[str]:
    """Yield the lines of a section per error class, with a table row for each reason."""
    yield "# Errors"
    yield ""
    yield "Every error has a code that never changes its meaning. `fate` says whether the call took"
    yield "effect: `not_done`, or `unknown`, if it may have been done."
    rows: dict[str, list[errors.Reason]] = {}
    for reason in errors.Reason:
        rows.setdefault(reason.kind, []).append(reason)
    for name in sorted(vars(errors)):
        error_class = vars(errors)[name]
        if not (inspect.isclass(error_class) and issubclass(error_class, errors.KeylaneError)):
            continue
        yield f"\n## {name}\n"
        yield inspect.cleandoc(error_class.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        yield ""
        yield "| code | reason | what happened | fate | what to do |"
        yield "| --- | --- | --- | --- | --- |"
        code = error_class.__dict__.get("code")
        if code is not None:
            cells = f"{table_cell(error_class.summary)} | {error_class.fate.value}"
            yield f"| {code} | | {cells} | {table_cell(error_class.hint)} |"
        for each in sorted(rows.get(name, []), key=lambda reason: reason.code):
            cells = f"{table_cell(each.summary)} | {each.fate.value} | {table_cell(each.hint)}"
            yield f"| {each.code} | `{each.name}` | {cells} |"


def command_lines() -> Iterator[str]:
    """Yield the lines of a section per command, with its arguments and options."""
    yield "# Commands"
    yield from _command_lines(app, None, "keylane")


def _command_lines(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    if names:
        for each in names:
            yield from _command_lines(command.get_command(context, each), context, f"{name} {each}")
        return
    yield f"\n## {name}\n"
    yield "\n\n".join(map(table_cell, (command.help or "").split("\n\n")))
    rows = [row for row in map(_parameter_row, command.params) if row]
    if rows:
        yield "\n| | default | |\n| --- | --- | --- |"
        yield from rows


def _parameter_row(parameter: Any) -> str:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return ""
    default = parameter.to_info_dict().get("default")  # None, not click's mark, if there is none
    has_default = not parameter.required and default not in (None, "", (), [])
    shown_default = f"`{str(default).lower() if default in (True, False) else default}`"
    described = getattr(parameter, "show_default", None)  # such as "never"
    shown_default = described if isinstance(described, str) else shown_default * has_default
    text = getattr(parameter, "summary", "") or getattr(parameter, "help", "")
    names = ", ".join(f"`{each}`" for each in parameter.opts)
    return f"| {names} | {shown_default} | {table_cell(text or '')} |"
