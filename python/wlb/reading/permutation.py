"""A shuffle that needs no memory."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Permutation:
    """A pseudo-random bijection of 0..size-1, computed when it is needed.

    A Feistel network over the smallest power of two that holds `size`, repeated until its result is below `size` (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002). So 10^8 documents are shuffled without an array of 10^8
    indices on every rank, resuming in the middle costs nothing, and the order depends on no library's random generator:
    a state saved today means the same under any later numpy.

    Args:
        size: elements, at least 1.
        seed: any integer.
        epoch: each epoch has another permutation.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        bits = max(2, (size - 1).bit_length())
        self._size = np.uint64(size)
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        # A hash's highest bits are its best.
        self._to_low = np.uint64(64 - bits // 2)
        self._to_high = np.uint64(64 - (bits - bits // 2))
        digest = hashlib.blake2b(f"{size}/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n]: the elements at `positions`. O(n), less than two network passes on average."""
        elements = self._network(positions.astype(np.uint64))
        while (outside := np.flatnonzero(elements >= self._size)).size:
            elements[outside] = self._network(elements[outside])
        return elements.astype(np.int64)

    def _network(self, elements: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = elements >> self._low_bits, elements & self._low_mask
        for key_high, key_low in self._keys.reshape(-1, 2):
            high ^= _hash(low, key_high) >> self._to_high
            low ^= _hash(high, key_low) >> self._to_low
        result: NDArray[np.uint64] = high << self._low_bits | low
        return result


def _hash(elements: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = (elements ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed
