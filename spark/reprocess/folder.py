"""The output folder of a job: Parquet files of pieces, each with its facts in the footer, and the
manifest. Files.

    DIR/part-<partition>-<start>-<end>.parquet   the rows of a piece; its facts are in the footer,
                                                 so that both appear together
    DIR/_keylane/plan.json                       the manifest without pieces, which fixes the
                                                 ranges when the job begins
    DIR/_keylane/manifest.json                   the manifest, written after the last piece
    DIR/_keylane/pieces/<partition>-….json       the facts of a piece whose rows are in a subject
    DIR/_keylane/parked/part-….parquet           the messages of a piece for which the function
                                                 failed, with its errors
    DIR/_keylane/unfinished/                     files that are being written; readers of Parquet
                                                 ignore `_keylane`

Invariants
    A file gets its name only when it is complete and on the disk.
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
    """A folder that the driver and every worker see under the same path."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._internal = self.path / "_keylane"
        self._records = self._internal / "pieces"
        self.parked = self._internal / "parked"

    def read(self, name: str) -> Manifest | None:
        """Return the plan or the manifest, or None if there is none; raise JobError."""
        path = self._internal / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
        return decode_manifest(data, where=str(path))

    def write(self, name: str, manifest: Manifest) -> None:
        """Write the plan or the manifest, in one step."""
        temporary = self._new_temporary_file()
        temporary.write_bytes(encode_manifest(manifest))
        self._commit_file(temporary, self._internal / name)

    def remove(self, name: str) -> None:
        """Remove the plan or the manifest, if it is there."""
        (self._internal / name).unlink(missing_ok=True)

    def write_piece(self, piece: JobPiece, rows: pa.Table, mark: str) -> None:
        """Write the rows of a piece with its facts, in one step; a second write of the same piece
        changes nothing.
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
        """Note, in one step, that the rows of a piece are in a subject."""
        temporary = self._new_temporary_file()
        temporary.write_bytes(msgspec.json.encode((mark, piece)))
        self._records.mkdir(parents=True, exist_ok=True)
        self._commit_file(temporary, self._records / record_file(piece))

    def write_parked(self, piece: JobPiece, messages: pa.Table) -> None:
        """Write the parked messages of a piece, before the piece itself; if there are none, remove
        those of an earlier try.
        """
        path = self.parked / piece_file(piece.partition_id, piece.start, piece.end)
        if not messages.num_rows:
            path.unlink(missing_ok=True)
            return
        temporary = self._new_temporary_file()
        pq.write_table(messages, temporary)
        self.parked.mkdir(parents=True, exist_ok=True)
        self._commit_file(temporary, path)

    def parked_text(self, manifest: Manifest) -> str:
        """Return a text that says how many messages the job has parked, and where; "" for none."""
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
        Return the pieces that are done, sorted by partition and offset.

        Args:
            mark: the mark of the pieces that are made now.
            earlier_codes: the code of earlier pieces that also count, by their mark.
        """
        done = []

        def add_if_counted(piece_mark: str, piece: JobPiece) -> None:
            if piece_mark == mark:
                done.append(piece)
            elif piece_mark in earlier_codes:
                done.append(msgspec.structs.replace(piece, code=earlier_codes[piece_mark]))

        for path in self._records.glob("*.json"):
            add_if_counted(*msgspec.json.decode(path.read_bytes(), type=tuple[str, JobPiece]))
        for path in self.path.glob("part-*.parquet"):
            piece_metadata = (pq.read_schema(path).metadata or {}).get(PIECE_METADATA)
            if piece_metadata is None:
                continue
            piece_mark, piece = msgspec.json.decode(piece_metadata, type=tuple[str, JobPiece])
            if piece.file == path.name:
                add_if_counted(piece_mark, piece)
        return sorted(done, key=lambda piece: (piece.partition_id, piece.start))

    def read_rows(self, piece: JobPiece) -> pa.Table:
        """Return the rows of a piece."""
        return pq.read_table(self.path / piece.file).replace_schema_metadata(None)

    def done_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the partition id and the number of messages of each piece, from the file names."""
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
    """Return the name of a piece's file; names sort in the order of offsets."""
    return f"part-{partition_id:010d}-{start:016d}-{end:016d}.parquet"


def record_file(piece: JobPiece) -> str:
    """Return the name of the file with the facts of a piece whose rows are in a subject."""
    return f"{piece.partition_id:010d}-{piece.start:016d}-{piece.end:016d}.json"
