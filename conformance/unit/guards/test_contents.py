"""What a container holds is put back in place: whoever looks into it meanwhile finds what belongs there."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest

from ariadne.guards import contents_of, refill

SEEN: list[int] = []


class Looks(str):
    """A key that looks how much its table holds whenever the table asks for it, as another thread might."""

    table: Any = None

    def __hash__(self) -> int:
        if self.table is not None:
            SEEN.append(len(self.table))
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_is_never_empty_while_it_is_put_back(kind: Any) -> None:
    key = Looks("a")
    table = kind([(key, 1), ("b", 2), ("d", 3)])
    was = contents_of(table)
    table["b"], table["c"] = 4, 5
    key.table = table
    SEEN.clear()
    refill(table, was)
    assert table == was
    assert min(SEEN) == 3


@pytest.mark.parametrize(
    ("now", "was"),
    [
        ({"b": 2, "a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "x": 0, "c": 3}, {"a": 1, "b": 2, "c": 3}),
        ({True: 1}, {1: 1}),
        ({}, {"a": 1}),
        ({"a": 1}, {}),
    ],
)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_has_its_keys_in_their_order_again(kind: Any, now: dict[Any, Any], was: dict[Any, Any]) -> None:
    table = kind(now)
    refill(table, was)
    assert repr([*table.items()]) == repr([*was.items()])


@pytest.mark.parametrize("kind", [list, deque, set])
@pytest.mark.parametrize("now", [[], [1], [True, 7], [7, 8, 9, 10], [1, 2, 3]])
def test_other_containers_hold_what_they_held(kind: Any, now: list[Any]) -> None:
    thing = kind(now)
    refill(thing, contents_of(kind([1, 2, 3])))
    assert sorted(map(repr, thing)) == ["1", "2", "3"]
    assert kind is set or [*thing] == [1, 2, 3]
