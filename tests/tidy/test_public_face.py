"""`import keylane` is cheap and starts nothing; every public name is there when it is asked for."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import keylane
from keylane.protocol import errors
from tidy.tree import PROJECT, ROOT

LOOK = """
import json, sys, threading
before = set(sys.modules)
import keylane
plain = sorted({name.split(".")[0] for name in set(sys.modules) - before})
from keylane import KeylaneError, Message
print(json.dumps({
    "plain": plain,
    "contract": sorted({"aiohttp", "sqlalchemy", "pyspark", "uvloop"} & set(sys.modules)),
    "threads": threading.active_count(),
}))
"""


SNIPPET = """
import keylane
from keylane import FencedError, Produser
from keylane.errors import TokenUnknownError
reveal_type(FencedError)
reveal_type(TokenUnknownError)
reveal_type(TokenUnknownError().current_token)
reveal_type(keylane.Consumer)
keylane.Nonsense
"""


def test_importing_starts_nothing_and_loads_no_network_library():
    answer = subprocess.check_output([sys.executable, "-I", "-c", LOOK], text=True)
    seen = json.loads(answer)
    third_party = set(seen["plain"]) - set(sys.stdlib_module_names) - {"keylane"}
    assert not third_party
    assert seen["contract"] == []
    assert seen["threads"] == 1


def test_every_name_of_the_face_is_what_its_module_has():
    """Clients, values, settings and errors; a name without a home would be an error when it is first used."""
    assert {"Producer", "Consumer", "QueueReader", "Message", "Receipt"} <= set(keylane.__all__)
    for name in keylane.__all__:
        value = getattr(keylane, name)
        assert name in {"Handler", getattr(value, "__name__", "")}
    assert set(keylane.__all__) <= set(dir(keylane))


def test_errors_has_the_whole_tree():
    face = keylane.errors
    assert face.__all__ == errors.__all__
    for name in errors.__all__:
        assert getattr(face, name) is getattr(errors, name)


def test_type_checkers_know_the_face(tmp_path):
    """A class is a class, and a name that does not exist is an error."""
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(snippet)]
    typing = Path(sys.prefix) / "typing"  # an editable install is hidden from type checkers
    environment = {**os.environ, "MYPYPATH": str(typing)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for error in (errors.FencedError, errors.TokenUnknownError):
        assert f"-> {error.__module__}.{error.__name__}" in found.stdout
    assert "-> keylane.consumer.client.Consumer" in found.stdout
    assert 'Revealed type is "int | None"' in found.stdout
    assert found.stdout.count("error:") == 2
    assert 'Module "keylane" has no attribute "Produser"' in found.stdout
    assert 'Module has no attribute "Nonsense"' in found.stdout


def test_a_strange_name_is_an_attribute_error():
    assert not hasattr(keylane, "Produser")
    assert not hasattr(keylane, "_private")


def test_star_import_takes_the_face_and_no_more():
    names: dict[str, object] = {}
    exec("from keylane import *", names)
    names.pop("__builtins__")
    assert set(names) == set(keylane.__all__)


def test_the_version_is_written_the_same_everywhere():
    assert keylane.__version__ == PROJECT["project"]["version"] == version("keylane")
    assert f"## [{keylane.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_types_are_shipped():
    assert (ROOT / "py.typed").exists()


def test_the_root_is_imported_under_one_name_only():
    """pytest once took the root folder for a test package and imported it by the checkout's name."""
    face = str(ROOT / "__init__.py")
    names = [
        name for name, module in sys.modules.items() if getattr(module, "__file__", "") == face
    ]
    assert names == ["keylane"]
