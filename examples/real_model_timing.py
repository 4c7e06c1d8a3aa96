"""Real models timed: the forward, the split in several modes, the suffix alone, suffix training and prefix backward."""

import sys

from _common import table
from _timing import chosen, conditions, inputs, parser, split

from ariadne.benchmark import (
    BenchmarkResult,
    measure_forward,
    measure_prefix_backward,
    measure_split,
    measure_suffix,
    measure_suffix_training,
)

HEAD = ("model", "batch", "cut", "what", "mode", "average ms", "total s", "over the forward", "CUDA MiB")
MODES = ("debug_interpreter", "generated_eager", "compiled")


def main(argv: list[str] | None = None) -> int:
    """Print a table and return 0."""
    made = parser(__doc__, iterations=10, warmup=3)
    made.add_argument("--batches", nargs="+", type=int, default=[1], help="batch sizes (1)")
    made.add_argument("--modes", nargs="+", choices=MODES, default=["generated_eager"])
    options = made.parse_args(argv)
    entries, device = chosen(made, options)
    counts = {"iterations": options.iterations, "warmup": options.warmup}
    print(conditions(options, device))
    rows = []
    for entry in entries:
        model = entry.build().eval().to(device)
        trained = entry.build().train().to(device)
        runtimes = [
            [split(entry, m, options, device, mode, batches=options.batches, trainable=m is trained) for mode in options.modes]
            for m in (model, trained)
        ]  # fmt: skip
        for batch in options.batches:
            args, kwargs = inputs(entry, batch, device)
            given = {"example_kwargs": kwargs, **counts}
            whole = measure_forward(model, args, **given)
            found = [whole]
            for runtime in runtimes[0]:
                found += [measure_split(runtime, args, **given), measure_suffix(runtime, args, **given)]
            if batch > 1:  # BatchNorm does not train on one sample
                for runtime in runtimes[1]:
                    losses = {"loss_fn": lambda output, _, entry=entry: entry.loss(output), **given}
                    if any(p.requires_grad for p in runtime.suffix_parameters()):
                        found.append(measure_suffix_training(runtime, args, **losses))
                    if any(p.requires_grad for p in runtime.prefix_parameters()):
                        found.append(measure_prefix_backward(runtime, args, **losses))
            rows += [row(entry.name, result, whole) for result in found]
            print(*(f"{entry.name}: {result}" for result in found), sep="\n", file=sys.stderr, flush=True)
    print(table(HEAD, rows))
    return 0


def row(name: str, result: BenchmarkResult, whole: BenchmarkResult) -> tuple[str, ...]:
    """One result as a line of the table."""
    memory = "" if result.cuda_peak_bytes is None else f"{result.cuda_peak_bytes / 2**20:.1f}"
    times = f"{result.average * 1e3:.3f}", f"{result.total:.4g}", f"{result.average / whole.average:.3f}"
    return (name, str(result.batch), result.split_id or "", result.what, result.mode, *times, memory)


if __name__ == "__main__":
    sys.exit(main())
