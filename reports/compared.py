"""Split held against whole on the device that was measured, model by model: what `python -m benchmarks cuda` compares first."""

from __future__ import annotations

from collections.abc import Iterator

from reports.document import NOT_MEASURED, Block, Card, Cell, Prose, Table, cells
from reports.runs import Run
from reports.words import plural

TASKS = {"inference": "replay at four batches", "training": "three training steps"}


def blocks(run: Run) -> Iterator[Block]:
    """The table, and what its words mean; nothing where nothing was compared in this way."""
    if not run.compared:
        return
    yield Prose(
        f"Held against the whole model where it was measured: {counted(run)}. Each at three cuts: replay at batches 1, 2, 3 and 8, "
        "and up to three training steps in a row, with losses, parameters, buffers and gradients. A model whose own runs differ "
        "from one to the next is held under torch's deterministic algorithms; where these don't make it repeat itself, the split "
        "may lie no further from it than four times what its own runs lie apart."
    )
    rows = []
    for one in sorted(run.compared, key=lambda r: (r["device"], r["model"], r["task"])):
        fine = one["status"] == "ok"
        words = "; ".join(one.get("differs", ())) or one.get("reason", "")
        mark = Cell("equal" if fine and "spread" not in one else "within its own noise" if fine else one["status"],
                    "good" if fine and "spread" not in one else "" if fine else "bad")  # fmt: skip
        how = "deterministic algorithms" if one.get("deterministic") else "as it comes"
        if "spread" in one:
            how = "its own runs differ under any setting"
        rows.append(
            cells(one["model"], TASKS.get(one["task"], one["task"]), mark, str(one.get("compared", 0)), how, words)
        )
    head = ("model", "what", "found", "comparisons", "held", "differs")
    yield Table(f"Split against whole, on {_devices(run)}", head, tuple(rows), ("comparisons",))


def card(run: Run) -> Iterator[Card]:
    """What came of it, where it was asked."""
    if run.compared:
        bad = sum(r["status"] != "ok" for r in run.compared)
        title = f"Split against whole on {_devices(run)}"
        value = f"{len(run.compared) - bad} of {len(run.compared)} hold"
        yield Card(title, value, counted(run), "bad" if bad else "good", "equality")


def counted(run: Run) -> str:
    """How many comparisons of how many models, and how many came out otherwise."""
    if not run.compared:
        return NOT_MEASURED
    fine = [r for r in run.compared if r["status"] == "ok"]
    noisy = sorted({r["model"] for r in fine if "spread" in r})
    models = len({r["model"] for r in run.compared})
    told = f"{sum(r['compared'] for r in fine):,} comparisons of {plural(models, 'model')}"
    told += f", {len(run.compared) - len(fine)} of {plural(len(run.compared), 'task')} failed"
    return told + (
        f"; training of {', '.join(noisy)} within its own noise, all others bit for bit" if noisy else "; bit for bit"
    )


def _devices(run: Run) -> str:
    return ", ".join(sorted({r["device"].upper() if r["device"] != "cpu" else "the CPU" for r in run.compared}))
