"""`python -m model_zoo list [--family F] [--tag T]` and `python -m model_zoo show NAME`."""

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from model_zoo import Entry, MissingPackageError, UnknownNameError, entry, names
from model_zoo.values import leaves


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="model_zoo", description="Named models with seeded random weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="names and tags; builds nothing")
    listing.add_argument("--family", help="only this library's")
    listing.add_argument("--tag", help="only those with this tag")
    commands.add_parser("show", help="build one and describe it").add_argument("name")
    options = parser.parse_args(argv)
    try:
        lines = listed(options.family, options.tag) if options.command == "list" else shown(entry(options.name))
        print("\n".join(lines))
    except (UnknownNameError, MissingPackageError) as error:
        print(f"model_zoo: {error}", file=sys.stderr)
        return 2
    return 0


def listed(family: str | None, tag: str | None) -> Iterator[str]:
    """One line for each model: its name and its tags."""
    chosen = names(family, tag)
    width = max(map(len, chosen), default=0)
    for name in chosen:
        yield f"{name:{width}}  {' '.join(sorted(entry(name).tags))}"


def shown(chosen: Entry) -> Iterator[str]:
    """What a model takes and what it is made of; it is built, and not run."""
    model = chosen.build()
    args, kwargs = chosen.inputs(batch=2)
    yield f"{chosen.name}  ({type(model).__module__}.{type(model).__qualname__})"
    yield f"tags        {' '.join(sorted(chosen.tags))}"
    if "toy" in chosen.tags:
        yield f"isolates    {inspect.getdoc(chosen.make)}"
    if chosen.nondeterministic:
        yield f"two equal runs differ: {chosen.nondeterministic}"
    yield f"parameters  {_size(model):,} in {len(list(model.parameters()))} tensors"
    yield f"buffers     {sum(buffer.numel() for buffer in model.buffers()):,} in {len(list(model.buffers()))} tensors"
    yield f"modules     {len(list(model.modules()))}"
    yield "inputs at batch 2"
    given = [*leaves(args, "args"), *(leaf for name, value in kwargs.items() for leaf in leaves(value, name))]
    width = max([18, *(len(path) for path, _ in given)])
    for path, value in given:
        yield f"  {path:{width}} {_described(value)}"
    yield "children"
    for label, child in model.named_children():
        yield f"  {label:18} {type(child).__name__:22} {_size(child):>12,}"


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _described(value: Any) -> str:
    return (
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )


if __name__ == "__main__":
    sys.exit(main())
