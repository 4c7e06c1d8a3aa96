"""Steady-state replay, optimised: the model, the generated split and the compiled split, once all have warmed up.

The calls of each are timed in a row, in one process; `python -m benchmarks run` interleaves them and gives intervals.
"""

import sys

from _common import table
from _timing import BACKENDS, chosen, conditions, inputs, parser, split

from ariadne.benchmark import measure_forward, measure_split, measure_suffix

HEAD = ("model", "batch", "what", "mode", "median ms", "average ms", "total s", "over the model", "CUDA MiB")


def main(argv: list[str] | None = None) -> int:
    """Print a table and return 0."""
    made = parser(__doc__, iterations=50, warmup=20)
    made.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="batch sizes (1 4)")
    made.add_argument(
        "--backend", choices=(*BACKENDS, "none"), default="torch_compile", help="what compiles the segments"
    )
    options = made.parse_args(argv)
    entries, device = chosen(made, options)
    counts = {"iterations": options.iterations, "warmup": options.warmup}
    print(conditions(options, device))
    rows = []
    for entry in entries:
        model = entry.build().eval().to(device)
        runtimes = {"generated_eager": split(entry, model, options, device, "generated_eager", batches=options.batches)}
        if options.backend != "none":
            runtimes[f"compiled, {options.backend}"] = split(
                entry, model, options, device, "compiled", batches=options.batches,
                compile_options=BACKENDS[options.backend],
            )  # fmt: skip
        for batch in options.batches:
            args, kwargs = inputs(entry, batch, device)
            given = {"example_kwargs": kwargs, **counts}
            whole = measure_forward(model, args, **given)
            found = {("direct_forward", "eager"): whole}
            for mode, runtime in runtimes.items():
                runtime.warmup(*args, **kwargs)
                found["prefix_suffix", mode] = measure_split(runtime, args, **given)
                found["suffix_replay", mode] = measure_suffix(runtime, args, **given)
            for (what, mode), result in found.items():
                memory = "" if result.cuda_peak_bytes is None else f"{result.cuda_peak_bytes / 2**20:.1f}"
                times = [f"{1e3 * result.median:.3f}", f"{1e3 * result.average:.3f}", f"{result.total:.4g}"]
                rows.append([entry.name, str(batch), what, mode, *times, f"{result.median / whole.median:.3f}", memory])
                print(*rows[-1], file=sys.stderr, flush=True)
    print(table(HEAD, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
