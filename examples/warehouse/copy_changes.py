"""Copies changes of orders into Parquet files: python copy_changes.py FOLDER

A batch is acked when its file is on the disk. After a crash it is read again, perhaps as a part of
a larger batch, so a change may be in two files; each has a version, and report.py takes the last.
"""

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from keylane import ArrowBatch, Consumer

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")
CHANGE = pa.schema(
    [
        ("order", pa.int64()),
        ("version", pa.int64()),
        ("state", pa.string()),
        ("cents", pa.int64()),
    ]
)


def typed(batch: ArrowBatch) -> pa.Table:
    """The changes of a batch, in typed columns."""
    lines = b"\n".join(batch.record_batch["value"].to_pylist())
    options = pyarrow.json.ParseOptions(explicit_schema=CHANGE, unexpected_field_behavior="error")
    return pyarrow.json.read_json(io.BytesIO(lines), parse_options=options)


def write_file(batch: ArrowBatch, folder: Path) -> None:
    """Write the file of a batch. It appears as a whole, or not at all."""
    name = f"orders-{batch.partition_id}-{batch.start_offset}-{batch.next_offset}.parquet"
    unfinished = folder / f"{name}.{os.getpid()}.tmp"
    pyarrow.parquet.write_table(typed(batch), unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.rename(folder / name)


async def copy(meta: str, folder: Path) -> None:
    async with Consumer(meta, subject="orders", group="warehouse") as consumer:
        async for batch in consumer.batches():
            await asyncio.to_thread(write_file, batch, folder)
            await batch.ack()


async def main() -> None:
    task = asyncio.ensure_future(copy(META, Path(sys.argv[1])))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])


if __name__ == "__main__":
    asyncio.run(main())
