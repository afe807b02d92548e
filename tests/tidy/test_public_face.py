"""`import keylane` is cheap and starts nothing; every public name is there when it is asked for."""

import json
import subprocess
import sys
from importlib.metadata import version

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


def test_importing_starts_nothing_and_loads_no_network_library():
    answer = subprocess.check_output([sys.executable, "-I", "-c", LOOK], text=True)
    seen = json.loads(answer)
    third_party = set(seen["plain"]) - set(sys.stdlib_module_names) - {"keylane"}
    assert not third_party
    assert seen["contract"] == []
    assert seen["threads"] == 1


def test_the_face_has_the_clients_the_values_and_every_error():
    from keylane import Consumer, Message, Producer, QueueReader, Receipt

    assert Producer.__name__ == "Producer"
    assert Consumer.__name__ == "Consumer"
    assert QueueReader.__name__ == "QueueReader"
    assert Message.__module__ == Receipt.__module__ == "keylane.protocol.message"
    for name in errors.__all__:
        assert getattr(keylane, name) is getattr(errors, name)
    named = {"Producer", "Consumer", "QueueReader", "Message", "Receipt", *errors.__all__}
    assert set(keylane.__all__) == named
    assert named <= set(dir(keylane))


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
