"""`import keylane` is cheap and starts nothing; every public name is there when it is asked for."""

import json
import os
import pydoc
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import keylane
import keylane.testing
from keylane.protocol import errors
from keylane.protocol.membership.versions import VERSION
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

CLIENTS = """
import sys
from keylane import Admin, Consumer, Producer, QueueReader
from keylane.rpc import http_network
print(sorted({"aiohttp.web", "sqlalchemy", "uvloop", "cryptography", "pyarrow"} & set(sys.modules)))
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
CODECS = """
from keylane import Consumer, JsonCodec, Message, Producer, QueueReader
class Order: ...
reveal_type(Producer("m:1"))
reveal_type(Producer("m:1", codec=JsonCodec(Order)))
async def handle(message: Message[Order]) -> None:
    reveal_type(message.decode())
reveal_type(Consumer("m:1", subject="s", group="g", handler=handle, codec=JsonCodec(Order)))
reveal_type(QueueReader("m:1", subject="s", codec=JsonCodec(Order)))
async def send(plain: Producer, orders: Producer[Order]) -> None:
    plain.send("s", Order())
    orders.send("s", b"bytes")
    await orders.send("s", Order())
"""


def test_importing_starts_nothing_and_loads_no_network_library():
    answer = subprocess.check_output([sys.executable, "-I", "-c", LOOK], text=True)
    seen = json.loads(answer)
    third_party = set(seen["plain"]) - set(sys.stdlib_module_names) - {"keylane"}
    assert not third_party
    assert seen["contract"] == []
    assert seen["threads"] == 1


def test_clients_load_no_library_of_servers():
    """A program that sends and consumes begins sooner, and with less memory."""
    assert subprocess.check_output([sys.executable, "-I", "-c", CLIENTS], text=True) == "[]\n"


def test_every_name_of_the_face_is_what_its_module_has():
    """Clients, values, settings and errors; a name without a home would be an error when it is
    first used.
    """
    assert {"Producer", "Consumer", "QueueReader", "Message", "Receipt"} <= set(keylane.__all__)
    for name in keylane.__all__:
        value = getattr(keylane, name)
        assert name in {
            "BatchHandler",
            "Filter",
            "Handler",
            "NACK",
            "PartitionsCallback",
            getattr(value, "__name__", ""),
        }
    assert set(keylane.__all__) <= set(dir(keylane))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (keylane, {*keylane.__all__, "admin", "errors", "metrics", "sync"}),
        (keylane.errors, set(errors.__all__)),
        (keylane.testing, set(keylane.testing.__all__)),
    ],
)
def test_module_lists_its_public_names_only(module, names):
    """Not what it imports for itself, such as `re`: an editor offers these names."""
    assert {name for name in dir(module) if not name.startswith("__")} == names


def test_errors_has_the_whole_tree():
    face = keylane.errors
    for name in errors.__all__:
        assert getattr(face, name) is getattr(errors, name)


TYPING = Path(sys.prefix) / "typing"
"""Where type checkers find the package: its editable install is hidden from them."""


MYPY_CACHE = str(Path(sys.prefix) / ".mypy_cache_of_tests")
"""Nothing else uses it: without one the package and its libraries are checked anew, in 15 processor
seconds.
"""


def _checked(folder: Path, cache: str) -> list[str]:
    """The lines that mypy prints of the two programs."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache]
    checked = subprocess.run(
        [*command, "face.py", "codecs_of.py"],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(TYPING)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return checked.stdout.splitlines()


@pytest.fixture(scope="module")
def mypy_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of two programs outside of the checkout, without our settings: file to
    lines.
    """
    folder = tmp_path_factory.mktemp("programs")
    for name, text in (("face.py", SNIPPET), ("codecs_of.py", CODECS)):
        (folder / name).write_text(text)
    lines = _checked(folder, MYPY_CACHE)
    if any("INTERNAL ERROR" in line for line in lines):  # a cache that is damaged
        lines = _checked(folder, os.devnull)
    return {
        name: [line.partition(": ")[2] for line in lines if line.startswith(f"{name}:")]
        for name in ("face.py", "codecs_of.py")
    }


def errors_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("error:")]


def test_mypy_knows_the_face(mypy_says):
    """A class is a class, and a name that does not exist is an error."""
    said = mypy_says["face.py"]
    revealed = " ".join(line for line in said if "Revealed" in line)
    for error in (errors.FencedError, errors.TokenUnknownError):
        assert f"-> {error.__module__}.{error.__name__}" in revealed
    assert "-> keylane.consumer.client.Consumer" in revealed
    assert 'Revealed type is "int | None"' in revealed
    missing, unknown = sorted(errors_in(said))
    assert 'Module "keylane" has no attribute "Produser"' in missing
    assert 'Module has no attribute "Nonsense"' in unknown


def said_by_basedpyright(folder: Path, text: str) -> tuple[list[str], list[str]]:
    """What it reveals of a program, and its errors."""
    (folder / "program.py").write_text(text)
    settings = {"include": ["program.py"], "extraPaths": [str(TYPING)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(folder)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    messages = json.loads(checked.stdout)["generalDiagnostics"]
    revealed, refused = (
        [each["message"] for each in messages if each["severity"] == severity]
        for severity in ("information", "error")
    )
    return revealed, refused


def test_basedpyright_knows_the_face(tmp_path):
    """As mypy does."""
    revealed, refused = said_by_basedpyright(tmp_path, SNIPPET)
    assert revealed == [
        'Type of "FencedError" is "type[FencedError]"',
        'Type of "TokenUnknownError" is "type[TokenUnknownError]"',
        'Type of "TokenUnknownError().current_token" is "int | None"',
        'Type of "keylane.Consumer" is "type[Consumer[bytes]]"',
    ]
    assert refused == [
        '"Produser" is unknown import symbol',
        '"Nonsense" is not a known attribute of module "keylane"',
    ]


def test_basedpyright_knows_what_a_codec_makes_of_a_client(tmp_path):
    """As mypy does: an attribute that a class declares as a callable has no first argument for
    it.
    """
    revealed, refused = said_by_basedpyright(tmp_path, CODECS)
    assert [text.rpartition(" is ")[2] for text in revealed] == [
        '"Producer[bytes]"',
        '"Producer[Order]"',
        '"Order"',
        '"Consumer[Order]"',
        '"QueueReader[Order]"',
    ]
    assert ["Order" in text for text in refused] == [True, True]
    assert all('parameter "value"' in text for text in refused)


def test_clients_say_where_they_connect_and_whether_they_are_open():
    """The text of a client in a log or a debugger."""
    meta = ["127.0.0.1:7000", "[::1]:7001"]
    assert {
        repr(keylane.Admin(meta)),
        repr(keylane.Producer(meta)),
        repr(keylane.Consumer(meta, subject="s", group="g")),
        repr(keylane.QueueReader(meta, subject="s")),
        repr(keylane.Reader(meta, "s")),
    } == {
        "<Admin at 127.0.0.1:7000, [::1]:7001, closed>",
        "<Producer at 127.0.0.1:7000, [::1]:7001, closed>",
        "<Consumer of s in group g at 127.0.0.1:7000, [::1]:7001, closed>",
        "<QueueReader of s at 127.0.0.1:7000, [::1]:7001, closed>",
        "<Reader of s at 127.0.0.1:7000, [::1]:7001, closed>",
    }


def test_help_of_a_future_shows_no_fields():
    """Neither the batch that has the message nor its index is for programs."""
    shown = pydoc.plain(pydoc.render_doc(keylane.SendFuture))
    assert "add_done_callback" in shown
    assert "batch" not in shown
    assert "index" not in shown


def test_strange_name_is_an_attribute_error():
    assert not hasattr(keylane, "Produser")
    assert not hasattr(keylane, "_private")


def test_star_import_takes_the_face_and_no_more():
    names: dict[str, object] = {}
    exec("from keylane import *", names)
    names.pop("__builtins__")
    assert set(names) == set(keylane.__all__)


def test_version_is_written_the_same_everywhere():
    assert keylane.__version__ == PROJECT["project"]["version"] == version("keylane")
    assert keylane.__version__ == VERSION, "what programs tell each other"
    assert f"\n## {keylane.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_types_are_shipped():
    assert (ROOT / "py.typed").exists()


def test_root_is_imported_under_one_name_only():
    """pytest once took the root folder for a test package and imported it by the checkout's
    name.
    """
    face = str(ROOT / "__init__.py")
    names = [
        name for name, module in sys.modules.items() if getattr(module, "__file__", "") == face
    ]
    assert names == ["keylane"]


def test_mypy_knows_the_values_of_a_codec(mypy_says):
    """A producer without a codec takes bytes, one with a codec its values; and so do messages
    decode.
    """
    said = mypy_says["codecs_of.py"]
    revealed = [line.partition('"')[2].strip('"') for line in said if "Reveal" in line]
    assert revealed == [
        "keylane.producer.client.Producer[bytes]",
        "keylane.producer.client.Producer[codecs_of.Order]",
        "codecs_of.Order",
        "keylane.consumer.client.Consumer[codecs_of.Order]",
        "keylane.consumer.reading.queue_reader.QueueReader[codecs_of.Order]",
    ]
    other, plain = errors_in(said)
    assert 'matches argument types "str", "Order"' in other
    assert 'matches argument types "str", "bytes"' in plain


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("SubjectView", "admin"),
        ("QueueProgress", "consumer"),
        ("ProducerStats", "producer"),
        ("PartitionUnknownError", "errors"),
    ],
)
def test_import_says_where_a_name_is_when_another_module_exports_it(name: str, home: str):
    """`from keylane import SubjectView` names the import that works; other names stay unknown."""
    with pytest.raises(ImportError, match=rf"from keylane\.{home} import {name}"):
        exec(f"from keylane import {name}")
    assert not hasattr(keylane, "Nonsense")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from keylane import Nonsense")
