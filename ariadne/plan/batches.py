"""Batch sizes as closed ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch sizes that a plan serves: closed ranges, ascending."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Batches:
        """The ranges that hold exactly `sizes`."""
        if isinstance(sizes, range) and sizes.step == 1:
            return cls(((sizes.start, sizes.stop - 1),) if sizes else ())
        return cls.joined((b, b) for b in sizes)

    @classmethod
    def joined(cls, ranges: Iterable[tuple[int, int]]) -> Batches:
        """The ranges that hold exactly what the given ones hold."""
        found: list[tuple[int, int]] = []
        for lo, hi in sorted(ranges):
            if found and lo <= found[-1][1] + 1:
                found[-1] = found[-1][0], max(hi, found[-1][1])
            else:
                found.append((lo, hi))
        return cls(tuple(found))

    def __or__(self, other: Batches) -> Batches:
        return Batches.joined((*self.ranges, *other.ranges))

    def __sub__(self, other: Batches) -> Batches:
        found = []
        for lo, hi in self.ranges:
            for a, b in other.ranges:
                if a <= hi and b >= lo:
                    if lo < a:
                        found.append((lo, a - 1))
                    lo = b + 1
            if lo <= hi:
                found.append((lo, hi))
        return Batches(tuple(found))

    def __and__(self, other: Batches) -> Batches:
        return self - (self - other)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return sum(hi - lo + 1 for lo, hi in self.ranges)

    def __contains__(self, batch: int) -> bool:
        return any(lo <= batch <= hi for lo, hi in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for lo, hi in self.ranges:
            yield from range(lo, hi + 1)

    def __str__(self) -> str:
        return ", ".join(str(lo) if lo == hi else f"{lo} to {hi}" for lo, hi in self.ranges) or "none"
