"""Raw: data that Python keeps as bytes, which are written in place: numpy's arrays, those of Python's own, and bytearrays."""

from __future__ import annotations

from typing import Any

from ariadne.guards import is_a, is_array


def lender(view: memoryview) -> Any:
    """Whose data a view shows; None where it was released."""
    try:
        return view.obj
    except ValueError:
        return None


class Raw:
    """Such data, with what they were at one moment."""

    __slots__ = ("_was", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self._was: Any = thing.copy() if is_array(thing) else _bytes(thing)

    def moved(self) -> bool:
        """Whether they are others now."""
        return _bytes(self.thing) != (_bytes(self._was) if is_array(self._was) else self._was)

    def values(self) -> tuple[list[Any], list[Any]]:
        """What they were and are: numbers, or bytes."""
        if is_array(self.thing):
            return self._was.ravel().tolist(), self.thing.ravel().tolist()
        return [*self._was], [*_bytes(self.thing)]

    def put_back(self) -> None:
        """Make them what they were."""
        if is_array(self.thing):
            self.thing[...] = self._was
        elif len(_bytes(self.thing)) == len(self._was):  # a view of them that is in use forbids any other way
            memoryview(self.thing).cast("B")[:] = self._was
        else:
            del self.thing[:]
            self.thing.extend(self._was) if is_a(self.thing, bytearray) else self.thing.frombytes(self._was)


def _bytes(thing: Any) -> bytes:
    found: bytes = thing.tobytes() if is_array(thing) else memoryview(thing).tobytes()
    return found
