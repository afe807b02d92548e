"""The output folder of a job: the manifest, and a Parquet file per piece with metadata in its
footer. Performs file I/O.

    DIR/part-<partition>-<start>-<end>.parquet   the rows of a piece; its metadata is in the footer,
                                                 so that both appear together
    DIR/_keylane/plan.json                       the manifest without pieces, which fixes the
                                                 ranges when the job begins
    DIR/_keylane/manifest.json                   the manifest, written after the last piece
    DIR/_keylane/pieces/<partition>-….json       the metadata of a piece whose rows are in a subject
    DIR/_keylane/parked/part-….parquet           the messages of a piece for which the function
                                                 failed, with the errors
    DIR/_keylane/unfinished/                     files that are being written; Parquet readers
                                                 ignore `_keylane`

Invariants
    A file gets its final name only when it is complete and synced to disk.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ...protocol.errors import JobError, Reason
from ...protocol.reprocess.manifest import JobPiece, Manifest, decode_manifest, encode_manifest
from ...protocol.text import counted

PIECE_METADATA = b"keylane.piece"
PLAN, MANIFEST = "plan.json", "manifest.json"


class OutputFolder:
    """Reads and writes an output folder, which has the same path on the driver and on every
    worker.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._internal = self.path / "_keylane"
        self._records = self._internal / "pieces"
        self.parked = self._internal / "parked"

    def read(self, name: str) -> Manifest | None:
        """Return the plan or the manifest, or None if there is none. Raises JobError if it is
        unreadable.
        """
        path = self._internal / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
        return decode_manifest(data, where=str(path))

    def write(self, name: str, manifest: Manifest) -> None:
        """Write the plan or the manifest atomically."""
        temporary = self._new_temporary_file()
        temporary.write_bytes(encode_manifest(manifest))
        self._commit_file(temporary, self._internal / name)

    def remove(self, name: str) -> None:
        """Remove the plan or the manifest if it exists."""
        (self._internal / name).unlink(missing_ok=True)

    def write_piece(self, piece: JobPiece, rows: pa.Table, mark: str) -> None:
        """Write the rows and metadata of a piece atomically. A repeated write replaces the same
        file.
        """
        piece_metadata = msgspec.json.encode((mark, piece))
        temporary = self._new_temporary_file()
        pq.write_table(
            rows.replace_schema_metadata(
                {**(rows.schema.metadata or {}), PIECE_METADATA: piece_metadata}
            ),
            temporary,
        )
        self._commit_file(temporary, self.path / piece.file)

    def record_piece(self, piece: JobPiece, mark: str) -> None:
        """Record atomically that the rows of a piece are stored in a subject."""
        temporary = self._new_temporary_file()
        temporary.write_bytes(msgspec.json.encode((mark, piece)))
        self._records.mkdir(parents=True, exist_ok=True)
        self._commit_file(temporary, self._records / record_file(piece))

    def write_parked(self, piece: JobPiece, messages: pa.Table) -> None:
        """Write the parked messages of a piece, or remove those of an earlier attempt if there are
        none. Call this before the piece itself is written.
        """
        path = self.parked / piece_file(piece.partition_id, piece.start, piece.end)
        if not messages.num_rows:
            path.unlink(missing_ok=True)
            return
        temporary = self._new_temporary_file()
        pq.write_table(messages, temporary)
        self.parked.mkdir(parents=True, exist_ok=True)
        self._commit_file(temporary, path)

    def describe_parked(self, manifest: Manifest) -> str:
        """Return a sentence that tells how many messages the job has parked, and where; "" if there
        are none.
        """
        if not manifest.parked:
            return ""
        are = "it is" if manifest.parked == 1 else "they are"
        return (
            f"the function failed for {counted(manifest.parked, 'message')} of "
            f"{manifest.subject}: {are} parked in {self.parked}"
        )

    def pieces(
        self, mark: str, earlier_codes: Mapping[str, str] = MappingProxyType({})
    ) -> list[JobPiece]:
        """
        Return the finished pieces, sorted by partition and offset.

        Args:
            mark: the mark of pieces that were made by the current code.
            earlier_codes: the code of earlier pieces that also count, by mark.
        """
        counted_pieces = []

        def add_if_counted(piece_mark: str, piece: JobPiece) -> None:
            if piece_mark == mark:
                counted_pieces.append(piece)
            elif piece_mark in earlier_codes:
                counted_pieces.append(
                    msgspec.structs.replace(piece, code=earlier_codes[piece_mark])
                )

        for path in self._records.glob("*.json"):
            add_if_counted(*msgspec.json.decode(path.read_bytes(), type=tuple[str, JobPiece]))
        for path in self.path.glob("part-*.parquet"):
            piece_metadata = (pq.read_schema(path).metadata or {}).get(PIECE_METADATA)
            if piece_metadata is None:
                continue
            piece_mark, piece = msgspec.json.decode(piece_metadata, type=tuple[str, JobPiece])
            if piece.file == path.name:
                add_if_counted(piece_mark, piece)
        return sorted(counted_pieces, key=lambda piece: (piece.partition_id, piece.start))

    def read_rows(self, piece: JobPiece) -> pa.Table:
        """Return the rows of a piece."""
        return pq.read_table(self.path / piece.file).replace_schema_metadata(None)

    def done_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the partition id and the number of messages of each finished piece."""
        for path in chain(self.path.glob("part-*.parquet"), self._records.glob("*.json")):
            partition_id, start, end = path.stem.removeprefix("part-").split("-")
            yield int(partition_id), int(end) - int(start)

    def _new_temporary_file(self) -> Path:
        folder = self._internal / "unfinished"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    @staticmethod
    def _commit_file(temporary: Path, path: Path) -> None:
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)


def piece_file(partition_id: int, start: int, end: int) -> str:
    """Return the file name of a piece. Names sort by partition and offset."""
    return f"part-{partition_id:010d}-{start:016d}-{end:016d}.parquet"


def record_file(piece: JobPiece) -> str:
    """Return the name of the file with the metadata of a piece whose rows are in a subject."""
    return f"{piece.partition_id:010d}-{piece.start:016d}-{piece.end:016d}.json"
