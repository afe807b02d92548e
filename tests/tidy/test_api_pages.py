"""The API pages of the site have every public name, and links lead to files that are on the site."""

import importlib
import re

import pytest

import keylane.errors
from tidy.tree import ROOT, load_site_module

api, links = load_site_module("api"), load_site_module("links")
MODULES = sorted(
    f"keylane.{path.parent.name}"
    for path in ROOT.glob("*/__init__.py")
    if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE)
)


def test_public_modules_are_found():
    assert {"keylane.admin", "keylane.outbox", "keylane.sink", "keylane.testing"} <= set(MODULES)


@pytest.mark.parametrize("module", ["keylane", *MODULES, "keylane.spark"])
def test_api_pages_have_each_public_name_of_a_module(module):
    """Errors have a page of their own, with the reasons of each."""
    shown = {id(api.target_of(path)) for paths in api.api_names().values() for path in paths}
    shown |= {id(getattr(keylane.errors, name)) for name in dir(keylane.errors)}
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None) or api.public_names(module)
    assert [name for name in listed if id(getattr(loaded, name)) not in shown] == []


def test_api_pages_have_a_name_once_and_functions_too():
    lines = [line for page in api.API_PAGES for line in api.api_lines(page) if line]
    named = [line.removeprefix("::: ") for line in lines if line.startswith("::: ")]
    assert len(named) == len(set(named))
    assert {"keylane.sink.session.fenced", "keylane.NACK", "keylane.testing.cluster.run"} <= {
        *named
    }


def test_api_pages_are_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text()
    for page in api.API_PAGES:
        assert f": reference/{page}.md\n" in settings


@pytest.mark.parametrize(
    ("page", "text", "on_the_site"),
    [
        ("index.md", "[a](docs/ORDER.md#sending)", "[a](ORDER.md#sending)"),
        ("index.md", "![a](docs/peers.svg)", "![a](peers.svg)"),
        ("index.md", "[a](README.zh.md)", "[a](index.zh.md)"),
        ("index.md", "[a](examples/)", "[a](source/examples/README.md)"),
        ("do/upgrade.md", "[a](../../deploy/README.md)", "[a](../source/deploy/README.md)"),
        ("do/upgrade.md", "[a](../../README.md)", "[a](../index.md)"),
        ("do/upgrade.md", "[a](#words) [b](https://kafka.apache.org)", None),
        ("do/upgrade.md", "[a](nowhere.md)", None),
        ("source/examples/README.md", "[a](../docs/SPARK.md)", "[a](../../SPARK.md)"),
    ],
)
def test_link_leads_to_the_place_of_the_file_on_the_site(page, text, on_the_site):
    assert links.site_text(page, text) == (on_the_site or text)
