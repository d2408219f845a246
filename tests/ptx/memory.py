"""Global and shared memory that tell on those who misuse them."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SECTOR = 32  # bytes: what memory moves at least
RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FIRST, _RED_ZONE = 1 << 20, 1024
_ANYBODY = -2  # in place of a warp: several wrote the same


class MachineError(Exception):
    """What a card would not do, or would do and not tell."""


class Global:
    """Arrays, with red zones between them."""

    def __init__(self, arrays: Sequence[Array], num_inputs: int) -> None:
        self.arrays = arrays
        sizes = [-(-max(1, x.nbytes) // 256) * 256 + _RED_ZONE for x in arrays]
        self.starts = [sum(sizes[:i]) for i in range(len(arrays))]
        self.bytes = np.full(sum(sizes), 0xFF, np.uint8)
        self.readable, self.writable = np.zeros((2, self.bytes.size), bool)
        self.traffic: collections.Counter[str] = collections.Counter()
        for i, x in enumerate(arrays):
            place = self._place(i)
            self.bytes[place] = np.frombuffer(x.tobytes(), np.uint8)
            self.readable[place] = True
            self.writable[place] = i >= num_inputs

    @property
    def pointers(self) -> list[int]:
        return [_FIRST + start for start in self.starts]

    def array(self, i: int) -> Array:
        x = self.arrays[i]
        return self.bytes[self._place(i)].view(x.dtype).reshape(x.shape).copy()

    def load(self, address: Array, mask: Array, dtype: Any, count: int) -> Array:
        """[.., count] numbers that lie side by side; anything where the mask is false."""
        at = self._at(address, mask, dtype, count, self.readable, "load")
        self._count("loads", address, mask, count * np.dtype(dtype).itemsize)
        return np.asarray(self.bytes.view(dtype)[at])

    def store(self, address: Array, mask: Array, values: Array) -> None:
        at = self._at(address, mask, values.dtype, values.shape[-1], self.writable, "store")[mask]
        places = self.bytes.view(values.dtype)
        places[at] = values[mask]
        if (places[at] != values[mask]).any():
            raise MachineError("two threads store different numbers at one place")
        self._count("stores", address, mask, values.itemsize * values.shape[-1])

    def _place(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i] + self.arrays[i].nbytes)

    def _at(
        self, address: Array, mask: Array, dtype: Any, count: int, allowed: Array, what: str
    ) -> Array:
        size = np.dtype(dtype).itemsize
        offset = np.where(mask, address - _FIRST, 0)
        if (offset % (size * count)).any():
            raise MachineError(f"misaligned global {what}")
        if offset.min() < 0 or offset.max() + size * count > self.bytes.size:
            raise MachineError(f"global {what} far outside of all arrays")
        at = offset[..., None] // size + np.arange(count)
        if not (allowed[at * size] & allowed[at * size + size - 1] | ~mask[..., None]).all():
            raise MachineError(f"global {what} outside of what may be reached")
        return np.asarray(at)

    def _count(self, what: str, address: Array, mask: Array, width: int) -> None:
        """Bytes, requests of a warp, and the sectors that these touch."""
        by_warp, active = address.reshape(-1, 32), mask.reshape(-1, 32)
        first, last = by_warp // SECTOR, (by_warp + width - 1) // SECTOR
        touched = np.where(active[..., None], np.stack([first, last], -1), -1)
        touched = np.sort(touched.reshape(len(touched), -1), axis=1)
        new = (np.diff(touched, axis=1, prepend=-1) != 0) & (touched >= 0)
        self.traffic[f"{what} bytes"] += int(active.sum()) * width
        self.traffic[f"{what} requests"] += int(active.any(axis=1).sum())
        self.traffic[f"{what} sectors"] += int(new.sum())


class Shared:
    """The shared memory of several programs [programs, bytes], and who was where since when.

    What a warp writes, another may touch after the next barrier; what a warp reads, another may
    write after it. Times are counts of barriers passed.
    """

    def __init__(self, num_programs: int, size: int) -> None:
        self.bytes = np.full((num_programs, size), 0xFF, np.uint8)
        cells = (num_programs, math.ceil(size / 2))
        self.written, self.read = np.full((2, *cells), -1, np.int32)
        self.writer, self.reader = np.zeros((2, *cells), np.int16)
        self.coming = np.zeros(cells, np.int16)  # asynchronous copies that will write there

    def load(
        self, programs: Array, time: int, address: Array, mask: Array, dtype: Any, count: int
    ) -> Array:
        """Of [programs, threads], as `Global.load`."""
        at = self._at(address, mask, dtype, count, "load")
        self.reads(programs, time, address, mask, count * np.dtype(dtype).itemsize)
        return np.asarray(self.bytes.view(dtype)[programs[:, None, None], at])

    def store(self, programs: Array, time: int, address: Array, mask: Array, values: Array) -> None:
        at = self._at(address, mask, values.dtype, values.shape[-1], "store")[mask]
        self.writes(programs, time, address, mask, values.itemsize * values.shape[-1])
        row = programs[np.nonzero(mask)[0]][:, None]
        places = self.bytes.view(values.dtype)
        places[row, at] = values[mask]
        if (places[row, at] != values[mask]).any():
            raise MachineError("two threads store different numbers at one shared place")

    def reads(self, programs: Array, time: int, address: Array, mask: Array, width: int) -> None:
        """Reading of `width` bytes by each thread."""
        row, cell, warp = self._cells(programs, address, mask, width)
        self._settled(row, cell)
        self._ordered(row, cell, warp, time, self.written, self.writer, "a write")
        others = (self.read[row, cell] == time) & (self.reader[row, cell] != warp)
        self.reader[row, cell] = np.where(others, -1, warp)
        self.reader[row, cell] = np.where(self.reader[row, cell] != warp, -1, warp)
        self.read[row, cell] = time

    def writes(self, programs: Array, time: int, address: Array, mask: Array, width: int) -> None:
        row, cell, warp = self._cells(programs, address, mask, width)
        self._settled(row, cell)
        self._ordered(row, cell, warp, time, self.written, self.writer, "a write")
        self._ordered(row, cell, warp, time, self.read, self.reader, "a read")
        self.writer[row, cell] = warp
        self.writer[row, cell] = np.where(self.writer[row, cell] != warp, _ANYBODY, warp)
        self.written[row, cell] = time

    def expect(
        self, programs: Array, time: int, address: Array, mask: Array, width: int, change: int
    ) -> None:
        """An asynchronous copy sets out (1) or arrives (-1)."""
        row, cell, warp = self._cells(programs, address, mask, width)
        if change > 0:
            self._ordered(row, cell, warp, time, self.read, self.reader, "a read")
        np.add.at(self.coming, (row, cell), change)

    def _settled(self, row: Array, cell: Array) -> None:
        if self.coming[row, cell].any():
            raise MachineError("a place that an asynchronous copy is about to write")

    def _at(self, address: Array, mask: Array, dtype: Any, count: int, what: str) -> Array:
        size = np.dtype(dtype).itemsize
        offset = np.where(mask, address, 0)
        if (offset % (size * count)).any():
            raise MachineError(f"misaligned shared {what}")
        if offset.min() < 0 or offset.max() + size * count > self.bytes.shape[1]:
            raise MachineError(f"shared {what} outside")
        return np.asarray(offset[..., None] // size + np.arange(count))

    def _cells(self, programs: Array, address: Array, mask: Array, width: int) -> tuple[Array, ...]:
        row, thread = np.nonzero(mask)
        cell = address[mask][:, None] // 2 + np.arange(max(1, width // 2))
        return np.broadcast_arrays(
            programs[row][:, None], cell, (thread // 32)[:, None].astype(np.int16)
        )

    def _ordered(
        self,
        row: Array,
        cell: Array,
        warp: Array,
        time: int,
        times: Array,
        warps: Array,
        what: str,
    ) -> None:
        who = warps[row, cell]
        if ((times[row, cell] == time) & (who != warp) & (who != _ANYBODY)).any():
            raise MachineError(f"no barrier between {what} and what another warp does there")

    def fetches(self, programs: Array, time: int, address: Array) -> None:
        """Reading [programs, ..] by the tensor cores, on behalf of all warps."""
        row = programs.reshape(-1, *(1,) * (address.ndim - 1))
        if (self.written[row, address // 2] == time).any():
            raise MachineError("no barrier between a write and the tensor cores' read")
        self.reader[row, address // 2], self.read[row, address // 2] = -1, time
