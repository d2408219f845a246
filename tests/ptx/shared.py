"""Shared memory that tells of races."""

import collections
from typing import Any

import numpy as np

from tests.ptx.memory import RAW, Array, MachineError, different

_SIZE = 232448  # bytes of a program
_STEP = 64  # of time, a barrier; within it, which warp
_SEVERAL = _STEP - 1  # in place of a warp
_UNDER_WAY = np.int32(2**31 - 1)  # later than all times
_PENDING = {
    "a write": "a place that an asynchronous copy is about to write",
    "a read": "a place that the tensor cores may yet read",
}


class Shared:
    """The shared memory of several programs, and who was where since when.

    What a warp writes, another may touch after the next barrier; what a warp reads, another may
    write after it. Times are counts of barriers passed. For each two bytes `written` and `read`
    have the last time and warp as one number, 0 where there was none. So single bytes (what masks
    are moved as) are not watched.
    """

    def __init__(self, num_programs: int, traffic: collections.Counter[str] | None = None) -> None:
        self.traffic = traffic
        self.bytes = np.zeros(num_programs * _SIZE, np.uint8)
        self.written, self.read = np.zeros((2, num_programs * _SIZE // 2), np.int32)

    def load(
        self, programs: Array, time: int, address: Array, mask: Array, dtype: Any, count: int
    ) -> Array:
        """Of [programs, threads], as `Global.load`."""
        width = np.dtype(dtype).itemsize * count
        row = self._rows(programs, address, mask, width, "load")
        self._count(address, mask, width)
        if width > 1:
            self._reads(row[mask], _start(time), _who(mask, time), width)
        numbers: Array = self.bytes.view(dtype).reshape(-1, count).take(row, axis=0)
        return numbers

    def store(self, programs: Array, time: int, address: Array, mask: Array, values: Array) -> None:
        self._count(address, mask, values.itemsize * values.shape[-1])
        self._put(programs, time, address, mask, values)

    def _put(self, programs: Array, time: int, address: Array, mask: Array, values: Array) -> None:
        width = values.itemsize * values.shape[-1]
        row = self._rows(programs, address, mask, width, "store")[mask]
        if width > 1:
            self._writes(row, _start(time), _who(mask, time), width)
        places, values = self.bytes.view(values.dtype).reshape(-1, values.shape[-1]), values[mask]
        places[row] = values
        if different(places[row], values).any():
            raise MachineError("two threads store different numbers at one shared place")

    def expect(self, programs: Array, time: int, address: Array, mask: Array, width: int) -> None:
        """An asynchronous copy sets out: until it arrives, nobody may be there."""
        row = self._rows(programs, address, mask, width, "copy")[mask]
        self._count(address, mask, width)
        self._writes(row, _start(time), _who(mask, time), width)
        _of(self.written, width)[row] = _UNDER_WAY

    def arrive(
        self, programs: Array, time: int, address: Array, mask: Array, values: Array
    ) -> None:
        """What an asynchronous copy brings."""
        width = values.itemsize * values.shape[-1]
        _of(self.written, width)[self._rows(programs, address, mask, width, "copy")[mask]] = 0
        self._put(programs, time, address, mask, values)

    def fetch(self, programs: Array, time: int, address: Array, size: int) -> Array:
        """What the tensor cores read at [programs, ..]: until `fetched`, nobody may write there."""
        place = _flat(programs, address)
        _readable(self.written[place // 2], _start(time), None)
        self.read[place // 2] = _UNDER_WAY
        numbers: Array = self.bytes.view(RAW[size])[place // size]
        return numbers

    def fetched(self, programs: Array, time: int, address: Array) -> None:
        self.read[_flat(programs, address) // 2] = _start(time) + _SEVERAL

    def _count(self, address: Array, mask: Array, width: int) -> None:
        """Turns of 128 bytes at most, and the cycles they take: in one a bank gives four bytes."""
        if self.traffic is None:
            return
        shape = -1, min(32, 128 // width)
        address, active = address.reshape(shape), mask.reshape(shape)[..., None]
        words = np.where(active, address[..., None] // 4 + np.arange(-(-width // 4)), -1)
        words = np.sort(words.reshape(len(words), -1), axis=1)
        new = (np.diff(words, axis=1, prepend=-1) != 0) & (words >= 0)
        banks = np.zeros((len(words), 32), int)
        turn, _ = np.nonzero(new)
        np.add.at(banks, (turn, words[new] % 32), 1)
        self.traffic["shared turns"] += int(new.any(axis=1).sum())
        self.traffic["shared cycles"] += int(banks.max(axis=1).sum())

    def _rows(self, programs: Array, address: Array, mask: Array, width: int, what: str) -> Array:
        """Places, counted in `width` bytes; 0 where the mask is false."""
        offset = np.where(mask, address, 0)
        if (offset & (width - 1)).any():
            raise MachineError(f"misaligned shared {what}")
        if offset.min() < 0 or offset.max() + width > _SIZE:
            raise MachineError(f"shared {what} outside")
        return _flat(programs, offset) // width

    def _reads(self, row: Array, start: int, who: Array, width: int) -> None:
        _readable(_of(self.written, width)[row], start, who)
        read = _of(self.read, width)
        before = read[row]
        others = (before >= start) & (before != who)
        stamps = np.where(others, np.maximum(before, start + _SEVERAL), who)
        read[row] = stamps
        again = row[(read[row] != stamps).any(axis=1)]  # where several warps read at once
        read[again] = np.maximum(read[again], start + _SEVERAL)

    def _writes(self, row: Array, start: int, who: Array, width: int) -> None:
        written = _of(self.written, width)
        _ordered(written[row], start, who, "a write")
        _ordered(_of(self.read, width)[row], start, who, "a read")
        written[row] = who
        written[row[(written[row] != who).any(axis=1)]] = start + _SEVERAL


def _start(time: int) -> int:
    return _STEP * (time + 1)


def _who(mask: Array, time: int) -> Array:
    """[active threads, 1]: when and which warp."""
    return (_start(time) + np.nonzero(mask)[1] // 32).astype(np.int32)[:, None]


def _flat(programs: Array, address: Array) -> Array:
    return programs.reshape(-1, *(1,) * (address.ndim - 1)) * _SIZE + address


def _of(stamps: Array, width: int) -> Array:
    """One row for each `width` bytes."""
    return stamps.reshape(-1, max(1, width // 2))


def _readable(written: Array, start: int, who: Array | None) -> None:
    if not written.all():
        raise MachineError("a place in shared memory is read before it is written")
    _ordered(written, start, who, "a write")


def _ordered(stamps: Array, start: int, who: Array | None, what: str) -> None:
    """Nobody else was there since the last barrier."""
    recent = stamps >= start
    if who is not None:
        recent &= stamps != who
    if (stamps[recent] == _UNDER_WAY).any():
        raise MachineError(_PENDING[what])
    if recent.any():
        raise MachineError(f"no barrier between {what} and what another warp does there")
