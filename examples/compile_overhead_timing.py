"""What compiling a split costs, what a call then saves over the model, and after how many iterations that is paid back.

The cost is that of preparing and of all calls before steady state, beyond as many steady calls. One artefact serves all
batches, so the first batch bears it. Caches are used as they are found: point TORCHINDUCTOR_CACHE_DIR to an empty folder for a
cold start. One process gives an estimate without bounds; `python -m benchmarks run` starts several, cold and warm, and gives an
interval and a verdict.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import split_step, table
from _timing import BACKENDS, chosen, conditions, inputs, parser, split

from ariadne import SplitRuntime
from benchmarks.break_even import excess
from benchmarks.timing import calls
from model_zoo import Entry

HEAD = (
    "model",
    "mode",
    "batch",
    "prepare s",
    "first call s",
    "cost s",
    "model ms",
    "compiled ms",
    "break-even iterations",
)
LEARNING_RATE = 1e-5
Call = Callable[[], Any]


def main(argv: list[str] | None = None) -> int:
    """Print a table and return 0."""
    made = parser(__doc__, iterations=20, warmup=5)
    made.add_argument("--batches", nargs="+", type=int, default=[4], help="batch sizes (4)")
    made.add_argument(
        "--modes", nargs="+", choices=("replay", "retain"), default=["replay"], help="inference, training"
    )
    made.add_argument(
        "--backend", choices=tuple(BACKENDS), default="torch_compile", help="what compiles; retain: the first"
    )
    options = made.parse_args(argv)
    if "retain" in options.modes and options.backend != "torch_compile":
        made.error(f"--backend {options.backend} is for inference; retain trains, which torch_compile can")
    entries, device = chosen(made, options)
    print(conditions(options, device))
    rows = []
    for entry in entries:
        for mode in options.modes:
            training = mode == "retain"
            model = entry.build().train(training).to(device)
            start = time.perf_counter()
            runtime = split(
                entry, model, options, device, "compiled", batches=options.batches, trainable=training,
                compile_options=BACKENDS[options.backend],
            )  # fmt: skip
            prepared = time.perf_counter() - start
            for number, batch in enumerate(options.batches):
                args, kwargs = inputs(entry, batch, device)
                with torch.set_grad_enabled(training):
                    whole, halves = steps(entry, runtime, args, kwargs, training)
                    times = measured(whole, halves, options.warmup, options.iterations, device)
                row = [entry.name, mode, str(batch), *figures(prepared if number == 0 else 0.0, *times)]
                if number:  # what it cost was paid at the first batch: what is left of it here is no figure to compare
                    row[-1] = f"see batch {options.batches[0]}, which bore the cost"
                rows.append(row)
                print(*rows[-1], file=sys.stderr, flush=True)
    print(table(HEAD, rows))
    return 0


def steps(
    entry: Entry, runtime: SplitRuntime, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> tuple[Call, Call]:
    """One call of the whole model and one of the split: a forward, or a step of training."""
    model = runtime.model
    if not training:
        return (lambda: model(*args, **kwargs)), (lambda: runtime.run_suffix(runtime.run_prefix(*args, **kwargs)))
    prefix = runtime.prefix_parameters()
    mine = set(map(id, prefix))
    suffix = [p for p in runtime.suffix_parameters() if id(p) not in mine]
    owners = [torch.optim.SGD(side, lr=LEARNING_RATE) if side else None for side in (prefix, suffix)]
    whole = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        whole.zero_grad()
        entry.loss(model(*args, **kwargs)).backward()
        whole.step()

    return step, lambda: split_step(runtime, entry, args, kwargs, *owners)


def measured(
    whole: Call, halves: Call, warmup: int, iterations: int, device: str
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the first calls of the split, of its steady ones, and of steady ones of the model."""
    calls(whole, max(1, warmup), device)  # what the process pays once is no cost of compiling
    first = calls(halves, max(1, warmup), device)
    steady: tuple[list[float], list[float]] = ([], [])
    for _ in range(iterations):
        steady[0].extend(calls(halves, 1, device))
        steady[1].extend(calls(whole, 1, device))
    return first, *steady


def figures(prepared: float, first: list[float], compiled: list[float], eager: list[float]) -> list[str]:
    """One row of figures, from the raw times."""
    fast, slow = statistics.median(compiled), statistics.median(eager)
    cost = excess(prepared, first, fast)
    n = f"about {math.ceil(max(0.0, cost) / (slow - fast)):,}" if fast < slow else "none: no call was saved time"
    return [f"{prepared:.2f}", f"{first[0]:.2f}", f"{cost:.2f}", f"{1e3 * slow:.3f}", f"{1e3 * fast:.3f}", n]


if __name__ == "__main__":
    sys.exit(main())
