"""Global memory that tells on those who misuse it."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SECTOR = 32  # bytes: what memory moves at least
RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_APART = 1 << 40


def different(a: Array, b: Array) -> Array:
    """Where bits differ, unless both are float32 NaNs, whose signs depend on operand order."""
    bits = np.asarray(a != b)
    if a.itemsize == 4 and bits.any():
        bits &= ~(np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32)))
    return bits


class MachineError(Exception):
    """What a card would not do, or would do and not tell."""


class Global:
    """Arrays, each too far from the next to be reached from it by mistake."""

    def __init__(
        self,
        arrays: Sequence[Array],
        num_inputs: int,
        traffic: collections.Counter[str] | None,
    ) -> None:
        self.arrays, self.num_inputs, self.traffic = arrays, num_inputs, traffic
        self.bytes = [_padded(x) for x in arrays]
        self.stored = [np.zeros_like(x) for x in self.bytes]

    @property
    def pointers(self) -> list[int]:
        return [_APART * (i + 1) for i in range(len(self.arrays))]

    def array(self, i: int) -> Array:
        x = self.arrays[i]
        return self.bytes[i][: x.nbytes].view(x.dtype).reshape(x.shape)

    def load(self, address: Array, mask: Array, dtype: Any, count: int) -> Array:
        """[.., count] numbers that lie side by side; anything where the mask is false."""
        if not mask.any():
            return np.zeros((*mask.shape, count), dtype)
        i, row = self._row(address, mask, np.dtype(dtype).itemsize * count, "load")
        if i >= self.num_inputs:
            raise MachineError("global load from a result")
        numbers: Array = self.bytes[i].view(dtype).reshape(-1, count).take(row, axis=0)
        return numbers

    def store(self, address: Array, mask: Array, values: Array) -> None:
        if not mask.any():
            return
        i, row = self._row(address, mask, values.itemsize * values.shape[-1], "store")
        if i < self.num_inputs:
            raise MachineError("global store into an operand")
        row, values = row[mask], values[mask]
        places, stored = (
            x[i].view(values.dtype).reshape(-1, values.shape[-1]) for x in (self.bytes, self.stored)
        )
        differs = different(places[row], values) & (stored[row] != 0)
        places[row], stored[row] = values, ~values.dtype.type(0)
        if differs.any() or different(places[row], values).any():
            raise MachineError("different numbers are stored at one place")

    def _row(self, address: Array, mask: Array, width: int, what: str) -> tuple[int, Array]:
        """The array that is meant, and where in it, counted in `width` bytes; 0 if masked."""
        active = address[mask]
        if (active & (width - 1)).any():
            raise MachineError(f"misaligned global {what}")
        low, high = int(active.min()), int(active.max())
        i = low // _APART - 1
        if not 0 <= i < len(self.arrays) or high + width > _APART * (i + 1) + self.arrays[i].nbytes:
            raise MachineError(f"global {what} outside of an array")
        if self.traffic is not None:
            self._count(self.traffic, f"{what}s", address, mask, width)
        return i, np.where(mask, address - _APART * (i + 1), 0) // width

    @staticmethod
    def _count(
        traffic: collections.Counter[str], what: str, address: Array, mask: Array, width: int
    ) -> None:
        """Bytes, requests of a warp, and the sectors that these touch."""
        active = mask.reshape(-1, 32)
        touched = np.sort(np.where(active, address.reshape(-1, 32) // SECTOR, -1), axis=1)
        new = (np.diff(touched, axis=1, prepend=-1) != 0) & (touched >= 0)
        traffic[f"{what} bytes"] += int(active.sum()) * width
        traffic[f"{what} requests"] += int(active.any(axis=1).sum())
        traffic[f"{what} sectors"] += int(new.sum())


def _padded(x: Array) -> Array:
    """The bytes of an array, as many as the widest access needs."""
    padded = np.zeros(-(-x.nbytes // 16) * 16, np.uint8)
    padded[: x.nbytes] = x.reshape(-1).view(np.uint8)
    return padded
