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

FACTS = b"keylane.piece"
PLAN, MANIFEST = "plan.json", "manifest.json"


class OutputFolder:
    """A folder that the driver and every worker see under the same path."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._own = self.path / "_keylane"
        self._facts = self._own / "pieces"
        self.parked = self._own / "parked"

    def read(self, name: str) -> Manifest | None:
        """Return the plan or the manifest, or None if there is none; raise JobError."""
        path = self._own / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
        return decode_manifest(data, where=str(path))

    def write(self, name: str, manifest: Manifest) -> None:
        """Write the plan or the manifest, in one step."""
        unfinished = self._unfinished()
        unfinished.write_bytes(encode_manifest(manifest))
        self._finish(unfinished, self._own / name)

    def forget(self, name: str) -> None:
        """Remove the plan or the manifest, if it is there."""
        (self._own / name).unlink(missing_ok=True)

    def write_piece(self, piece: JobPiece, rows: pa.Table, mark: str) -> None:
        """Write the rows of a piece with its facts, in one step; a second write of the same piece
        changes nothing.
        """
        facts = msgspec.json.encode((mark, piece))
        unfinished = self._unfinished()
        pq.write_table(
            rows.replace_schema_metadata({**(rows.schema.metadata or {}), FACTS: facts}), unfinished
        )
        self._finish(unfinished, self.path / piece.file)

    def write_facts(self, piece: JobPiece, mark: str) -> None:
        """Note, in one step, that the rows of a piece are in a subject."""
        unfinished = self._unfinished()
        unfinished.write_bytes(msgspec.json.encode((mark, piece)))
        self._facts.mkdir(parents=True, exist_ok=True)
        self._finish(unfinished, self._facts / facts_file(piece))

    def write_parked(self, piece: JobPiece, messages: pa.Table) -> None:
        """Write the parked messages of a piece, before the piece itself; if there are none, remove
        those of an earlier try.
        """
        path = self.parked / piece_file(piece.partition_id, piece.start, piece.end)
        if not messages.num_rows:
            path.unlink(missing_ok=True)
            return
        unfinished = self._unfinished()
        pq.write_table(messages, unfinished)
        self.parked.mkdir(parents=True, exist_ok=True)
        self._finish(unfinished, path)

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
        self, mark: str, earlier: Mapping[str, str] = MappingProxyType({})
    ) -> list[JobPiece]:
        """
        Return the pieces that are done, sorted by partition and offset.

        Args:
            mark: the mark of the pieces that are made now.
            earlier: the code of earlier pieces that also count, by their mark.
        """
        done = []

        def take(by: str, piece: JobPiece) -> None:
            if by == mark:
                done.append(piece)
            elif by in earlier:
                done.append(msgspec.structs.replace(piece, code=earlier[by]))

        for path in self._facts.glob("*.json"):
            take(*msgspec.json.decode(path.read_bytes(), type=tuple[str, JobPiece]))
        for path in self.path.glob("part-*.parquet"):
            facts = (pq.read_schema(path).metadata or {}).get(FACTS)
            if facts is None:
                continue
            by, piece = msgspec.json.decode(facts, type=tuple[str, JobPiece])
            if piece.file == path.name:
                take(by, piece)
        return sorted(done, key=lambda piece: (piece.partition_id, piece.start))

    def rows_of(self, piece: JobPiece) -> pa.Table:
        """Return the rows of a piece."""
        return pq.read_table(self.path / piece.file).replace_schema_metadata(None)

    def done_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the partition id and the number of messages of each piece, from the file names."""
        for path in chain(self.path.glob("part-*.parquet"), self._facts.glob("*.json")):
            partition_id, start, end = path.stem.removeprefix("part-").split("-")
            yield int(partition_id), int(end) - int(start)

    def _unfinished(self) -> Path:
        folder = self._own / "unfinished"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    @staticmethod
    def _finish(unfinished: Path, path: Path) -> None:
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(path)


def piece_file(partition_id: int, start: int, end: int) -> str:
    """Return the name of a piece's file; names sort in the order of offsets."""
    return f"part-{partition_id:010d}-{start:016d}-{end:016d}.parquet"


def facts_file(piece: JobPiece) -> str:
    """Return the name of the file with the facts of a piece whose rows are in a subject."""
    return f"{piece.partition_id:010d}-{piece.start:016d}-{piece.end:016d}.json"
