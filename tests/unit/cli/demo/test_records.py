"""A consumer's records survive the way through its file, and what was cut short is left out."""

from keylane.cli.demo.history import Record
from keylane.cli.demo.records import RecordTail, encode_record, parse_records

RECORDS = [
    Record(b"N14228", 0, 1, 0, 7, 123),
    Record(b"", 1, 4, 17, 8, 124),
    Record(b"a,b", 336_775, 2, 2**40, 9, 125),
]


def test_records_are_parsed_as_they_were_encoded():
    """Records read back as they were written, commas in a key and missing keys too."""
    assert parse_records(b"".join(map(encode_record, RECORDS))) == RECORDS


def test_last_line_does_not_count_when_it_is_cut():
    """A last line without its end belongs to a handler that never returned: it does not count."""
    data = b"".join(map(encode_record, RECORDS))
    for end in range(len(data) - len(encode_record(RECORDS[-1])), len(data)):
        assert parse_records(data[:end]) == RECORDS[:2]
    assert parse_records(b"") == []


def test_tail_takes_each_line_once_and_notes_when_owners_began(tmp_path):
    """A tail takes each line once, whole, and notes when each owner began."""
    path = tmp_path / "records.csv"
    tail = RecordTail(path)
    tail.poll()
    assert tail.records == []
    lines = [encode_record(record) for record in RECORDS]
    with path.open("ab") as file:
        for piece in (lines[0], lines[1][:3], lines[1][3:] + lines[2]):
            file.write(piece)
            file.flush()
            tail.poll()
    tail.poll()
    assert tail.records == RECORDS
    assert tail.first_at_ms == {(1, 7): 123, (4, 8): 124, (2, 9): 125}
