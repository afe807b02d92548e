"""The report takes the last version of each order, also where a change is in two files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from copy_changes import CHANGE
from report import count_orders


def write(path: Path, *changes: tuple[int, int, str, int]) -> None:
    rows = [dict(zip(CHANGE.names, change, strict=True)) for change in changes]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=CHANGE), path)


def test_report_takes_the_last_version_of_each_order(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", (1, 1, "placed", 100), (2, 1, "placed", 200))
    write(tmp_path / "b.parquet", (1, 1, "placed", 100), (1, 2, "paid", 150))
    assert count_orders(str(tmp_path)) == [("paid", 1, 150), ("placed", 1, 200)]
