"""What is said of subjects, for comparisons."""

from __future__ import annotations

from msgspec.structs import replace

from keylane.admin import SubjectDescription


def without_rates(described: SubjectDescription) -> SubjectDescription:
    """Return what is said of a subject, without what changes by itself."""
    partitions = [
        replace(each, messages_per_s=0.0, bytes_per_s=0.0) for each in described.partitions
    ]
    return replace(described, partitions=tuple(partitions))
