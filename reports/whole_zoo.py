"""The whole zoo in one figure: the split's time over the model's, how that is spread, and why it is above 1.02 where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.records import Records
from benchmarks.whole_zoo import LEAST, SLOW, Zoo, estimate, zoo_row, zoos
from reports import charts
from reports.document import Block, Cell, Figure, Figures, Prose, Section, Table
from reports.words import where


def sections(records: Records, least: int = LEAST) -> tuple[Section, ...]:
    """The section; none where no batch has as many models."""
    blocks = [block for zoo in zoos(records, least) for block in _blocks(zoo)]
    return (Section("zoo", "How fast is the whole zoo?", tuple(blocks)),) if blocks else ()


def _blocks(zoo: Zoo) -> Iterator[Block]:
    at = where(zoo.place)
    yield Prose(f"{at}: prefix, payload and suffix in eager mode over the model itself. {zoo.words()}")
    yield Figures(at, (_figure(zoo),))
    yield _table(
        f"How many models lie where, {at}", ("time over model(x)", "models"), [[w, str(n)] for w, n in zoo.spread()]
    )
    if zoo.slow:
        head = ("model", "ms", "time over model(x)", "95 %", "why")
        yield _table(f"Above {SLOW:g}, and why, {at}", head, [*map(zoo_row(zoo), zoo.slow)])


def _table(title: str, head: tuple[str, ...], rows: Sequence[Sequence[str]]) -> Table:
    numeric = tuple(name for name in head if name not in ("model", "why"))
    return Table(title, head, tuple(tuple(map(Cell, row)) for row in rows), numeric)


def _figure(zoo: Zoo) -> Figure:
    ratios = sorted(map(estimate, zoo.models))
    points = tuple((ratio, 100 * (i + 1) / len(ratios)) for i, ratio in enumerate(ratios))
    axes = "time over model(x)", "% of models at or below it"
    svg = charts.lines([charts.Line("models", points)], axes, x_log=True, y_log=False, rule=1.0)
    label = f"Share of models by time over the model's. {zoo.words()}"
    return Figure("All models", charts.named(svg, f"zoo-{zoo.place.batch}", label), label)
