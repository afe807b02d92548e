"""Computes the xxh3_64 hash of each row in a column of byte strings, vectorized. Pure.

The hash of a key determines its partition, so the result must equal `xxhash.xxh3_64_intdigest`.
XXH3 uses a different formula for each length class. The rows of a class are hashed together; keys
longer than `LONG` bytes are hashed one by one.

Source: the XXH3 specification (xxHash 0.8, `doc/xxhash_spec.md`), seed 0, for up to 64 bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
LONG = 64
"""The length in bytes above which vectorized hashing is not faster."""
BLOCK_ROWS = 8_192
"""The number of rows that are hashed together. They fit into a core's cache, which is three times
as fast as hashing 65,536 rows at once.
"""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
)
_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_MIX_1 = np.uint64(0x165667919E3779F9)
_MIX_2 = np.uint64(0x9FB21C651E98DF25)
_LOW = np.uint64(0xFFFFFFFF)


def _uint64(number: int) -> np.uint64:
    return np.uint64(number & 0xFFFF_FFFF_FFFF_FFFF)


def _secret(position: int) -> int:
    return int(struct.unpack_from("<Q", _SECRET, position)[0])


def hash_column(blob: npt.NDArray[np.uint8], edges: I64) -> U64:
    """
    Return the hash of each row.

    Args:
        blob: the rows' bytes, one after another.
        edges: the boundaries of the rows, one more than there are rows; row i is
            `blob[edges[i]:edges[i + 1]]`.
    """
    rows = len(edges) - 1
    if rows <= BLOCK_ROWS:
        return _hash_block(blob, edges)
    return np.concatenate(
        [
            _hash_block(blob, edges[start : start + BLOCK_ROWS + 1])
            for start in range(0, rows, BLOCK_ROWS)
        ]
    )


def _hash_block(blob: npt.NDArray[np.uint8], edges: I64) -> U64:
    lengths = np.diff(edges)
    starts = edges[:-1]
    hashes = np.empty(len(starts), np.uint64)
    if not len(starts):
        return hashes
    # 8-byte words are read at any position; the padding makes that safe near the end.
    first = int(edges[0])
    padded = np.zeros(int(edges[-1]) - first + 8, np.uint8)
    padded[:-8] = blob[first : int(edges[-1])]
    starts = starts - first
    for low, high, hash_class in (
        (0, 0, _hash_empty),
        (1, 3, _hash_1_to_3),
        (4, 8, _hash_4_to_8),
        (9, 16, _hash_9_to_16),
        (17, 32, _hash_17_to_64),
        (33, LONG, _hash_17_to_64),
        (LONG + 1, None, _hash_long),
    ):
        mask = lengths >= low if high is None else (lengths >= low) & (lengths <= high)
        count = int(np.count_nonzero(mask))
        if count == len(starts):
            return hash_class(padded, starts, lengths)
        if count:
            hashes[mask] = hash_class(padded, starts[mask], lengths[mask])
    return hashes


def _words_at(padded: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Return a view that has, at each index, the word that starts at that byte."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((len(padded) - size + 1,), dtype, padded.data, 0, (1,))


def _hash_empty(_padded: npt.NDArray[np.uint8], starts: I64, _lengths: I64) -> U64:
    return np.full(len(starts), np.uint64(xxhash.xxh3_64_intdigest(b"")))


def _hash_1_to_3(padded: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> U64:
    first = padded[starts].astype(np.uint64)
    middle = padded[starts + (lengths >> 1)].astype(np.uint64)
    last = padded[starts + lengths - 1].astype(np.uint64)
    combined = (
        (first << _uint64(16))
        | (middle << _uint64(24))
        | last
        | (lengths.astype(np.uint64) << _uint64(8))
    )
    flip = (_secret(0) & 0xFFFF_FFFF) ^ (_secret(0) >> 32)
    return _avalanche_64(combined ^ _uint64(flip))


def _hash_4_to_8(padded: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> U64:
    words = _words_at(padded, "<u4")
    mixed: U64 = words[starts + lengths - 4].astype(np.uint64)
    mixed += words[starts].astype(np.uint64) << _uint64(32)
    mixed ^= _uint64(_secret(8) ^ _secret(16))
    mixed ^= _rotate(mixed, 49) ^ _rotate(mixed, 24)
    mixed *= _MIX_2
    mixed ^= (mixed >> _uint64(35)) + lengths.astype(np.uint64)
    mixed *= _MIX_2
    mixed ^= mixed >> _uint64(28)
    return mixed


def _hash_9_to_16(padded: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> U64:
    words = _words_at(padded, "<u8")
    low = words[starts] ^ _uint64(_secret(24) ^ _secret(32))
    high = words[starts + lengths - 8] ^ _uint64(_secret(40) ^ _secret(48))
    mixed = lengths.astype(np.uint64) + low.byteswap() + high + _fold_product(low, high)
    return _avalanche(mixed)


def _hash_17_to_64(padded: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> U64:
    """Hash rows whose lengths are all from 17 to 32 bytes, or all from 33 to 64 bytes."""
    words = _words_at(padded, "<u8")
    mixed = lengths.astype(np.uint64) * _PRIME_1
    ends = starts + lengths
    pairs = (int(lengths[0]) - 1) // 32 + 1
    for pair in range(pairs):
        mixed += _mix_16(words, starts + 16 * pair, 32 * pair)
        mixed += _mix_16(words, ends - 16 * (pair + 1), 32 * pair + 16)
    return _avalanche(mixed)


def _hash_long(padded: npt.NDArray[np.uint8], starts: I64, lengths: I64) -> U64:
    data = padded.tobytes()
    digest = xxhash.xxh3_64_intdigest
    rows = zip(starts.tolist(), lengths.tolist(), strict=True)
    return np.fromiter(
        (digest(data[start : start + length]) for start, length in rows), np.uint64, len(starts)
    )


def _mix_16(words: U64, starts: I64, secret_at: int) -> U64:
    low = words[starts] ^ _uint64(_secret(secret_at))
    high = words[starts + 8] ^ _uint64(_secret(secret_at + 8))
    return _fold_product(low, high)


def _fold_product(left: U64, right: U64) -> U64:
    """Multiply to 128 bits, and return the low half XORed with the high half."""
    left_low, left_high = left & _LOW, left >> _uint64(32)
    right_low, right_high = right & _LOW, right >> _uint64(32)
    cross = left_high * right_low + ((left_low * right_low) >> _uint64(32))
    carry = left_low * right_high + (cross & _LOW)
    high = left_high * right_high + (cross >> _uint64(32)) + (carry >> _uint64(32))
    folded: U64 = (left * right) ^ high
    return folded


def _rotate(words: U64, bits: int) -> U64:
    return (words << _uint64(bits)) | (words >> _uint64(64 - bits))


def _avalanche(words: U64) -> U64:
    words ^= words >> _uint64(37)
    words *= _MIX_1
    return words ^ (words >> _uint64(32))


def _avalanche_64(words: U64) -> U64:
    words ^= words >> _uint64(33)
    words *= _PRIME_2
    words ^= words >> _uint64(29)
    words *= _PRIME_3
    return words ^ (words >> _uint64(32))
