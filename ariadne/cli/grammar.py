"""The grammar of the command line: every command with its options. Nothing here imports torch, so `--help` answers at once."""

from __future__ import annotations

import argparse

from ariadne.cli.options import (
    HELP,
    Commands,
    Parser,
    batches,
    command,
    mode,
    model_command,
    nbytes,
    positive,
    top,
    words,
)

ORDERS = ("cut", "bytes", "ops")
PICTURES = ("svg", "pdf", "png", "dot", "html")
BALANCES = ("time", "parameters", "memory", "boundary_bytes")
CHARTS = ("svg", "png", "html")
CACHE = ("list", "size", "clear", "limit")
SHELLS = ("bash", "zsh", "fish")
MEANINGS = {
    "twice": "the model itself, run twice, gives the same",
    "left": "preparing leaves the model as it was",
    "forward": "outputs, inputs, buffers and random draws equal the model's, on two inputs",
    "replay": "the suffix run twice on one boundary, with another in flight between, gives the same",
    "train": "losses, gradients, parameters, buffers, optimizer state and draws equal those of a copy, step by step",
}


def parser() -> Parser:
    """The parser of the whole command line."""
    root, commands = top()
    for add in (
        _plan,
        _cuts,
        _show,
        _draw,
        _profile,
        _check,
        _bench,
        _save,
        _inspect,
        _serve,
        _ping,
        _run,
        _keys,
        _parts,
        _cache,
        _doctor,
        _completion,
    ):
        add(commands)
    return root


def _plan(commands: Commands) -> None:
    made = model_command(
        commands,
        "plan",
        "print the plan of a model: its ops, how it was captured, its guards, and what could not be made dynamic",
    )
    made.add_argument("--brief", action="store_true", help="leave out the ops")


def _cuts(commands: Commands) -> None:
    made = model_command(
        commands, "cuts", "list the cuts of a model with what crosses each, or say why one is not safe"
    )
    made.add_argument(
        "--sort", choices=ORDERS, default="cut", help="cut: as they run; bytes: least first; ops: most even first"
    )
    made.add_argument("--safe", action="store_true", help="only safe ones")
    made.add_argument("--trainable", action="store_true", help="only those whose suffix has a parameter to train")
    made.add_argument("--top", type=positive, metavar="N", help="only the first N")
    made.add_argument("--csv", action="store_true", help="as CSV")
    made.add_argument(
        "--why",
        metavar="CUT",
        help="explain one cut: its number, after:layer3, percent:50, ...; is it safe, and what crosses",
    )


def _show(commands: Commands) -> None:
    made = model_command(commands, "show", "print the Python that runs on each side of a cut")
    made.add_argument("cut", metavar="CUT", help="where to cut: its number, after:layer3, percent:50, 50%%, auto")
    made.add_argument("--side", choices=("prefix", "suffix"), help="only this side")


def _draw(commands: Commands) -> None:
    made = model_command(commands, "draw", "draw a model, or with a cut its prefix, what crosses, and its suffix")
    made.add_argument("cut", metavar="CUT", nargs="?", help="where to cut; without it the model is drawn whole")
    made.add_argument("--out", metavar="PATH", help="where the picture goes (trace_graph or split_graph, here)")
    made.add_argument(
        "--format",
        choices=PICTURES,
        help="(by the ending of --out, or svg); html is a page to search and open modules in; it and dot need no Graphviz",
    )
    made.add_argument("--operations", action="store_true", help="every op as a box, and not modules")
    made.add_argument(
        "--depth", type=depth, default="auto", metavar="N", help="modules shown inside one another, or all"
    )
    made.add_argument("--unfold", action="store_true", help="every block, also those that are alike and drawn once")
    made.add_argument("--targets", action="store_true", help="with the ATen targets of the ops")
    made.add_argument("--markers", action="store_true", help="with what is written, drawn, aliased and switched")
    made.add_argument("--indices", action="store_true", help="with the numbers of the ops")


def _profile(commands: Commands) -> None:
    made = model_command(
        commands,
        "profile",
        "draw what crosses at every cut of a model, and with --measure the prefix's share of the time",
    )
    made.add_argument("--split", default="auto", metavar="CUT", help="the cut that is marked as chosen (auto)")
    made.add_argument("--out", metavar="PATH", help="where it goes (frontier_profile, here)")
    made.add_argument(
        "--format", choices=CHARTS, help="(by the ending of --out, or svg); html is a page to hover and click in"
    )
    made.add_argument("--measure", action="store_true", help="time the halves at some of the cuts, in this process")
    made.add_argument("--places", type=positive, default=12, metavar="N", help="at how many cuts (12)")
    made.add_argument("--iterations", type=positive, default=20, metavar="N", help="calls at each (20)")


def _check(commands: Commands) -> None:
    made = model_command(
        commands,
        "check",
        "check that the split equals the model, bit for bit, over cuts, batch sizes and training steps",
    )
    made.add_argument("--cuts", type=words, metavar="CUT,...", help="where to cut (q25,q50,q75)")
    made.add_argument("--every", action="store_true", help="at every safe cut")
    made.add_argument("--batches", type=batches, metavar="N,...", help="batch sizes (1,2,3,5)")
    made.add_argument("--steps", type=positive, default=3, metavar="N", help="training steps (3)")
    made.add_argument(
        "--seconds",
        type=positive,
        metavar="N",
        help="begin no further check after so long, save the first of each kind (30; all, where cuts or batches are named)",
    )
    made.add_argument(
        "--only", type=words, default=list(MEANINGS), metavar="CHECK,...",
        help="; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items()),
    )  # fmt: skip
    mode(made)


def _bench(commands: Commands) -> None:
    made = model_command(
        commands,
        "bench",
        "time the model against its split, in interleaved rounds, and say after how many calls a preparation has paid",
    )
    made.add_argument("--split", default="percent:50", metavar="CUT", help="where to cut (percent:50)")
    made.add_argument("--compile", action="store_true", help="also the split, compiled, and torch.compile(model)")
    made.add_argument(
        "--rounds",
        type=positive,
        default=10,
        metavar="N",
        help="at least so many rounds, each of all in another order (10)",
    )
    made.add_argument(
        "--seconds",
        type=positive,
        default=20,
        metavar="N",
        help="more rounds while intervals are wide, for so long (20)",
    )
    made.add_argument("--iterations", type=positive, default=5, metavar="N", help="calls of each in a round (5)")
    mode(made)


def _save(commands: Commands) -> None:
    made = model_command(commands, "save", "write one side of a cut to a file, to be loaded without the model's code")
    made.add_argument("cut", metavar="CUT", help="where to cut: its number, after:layer3, percent:50, 50%%, auto")
    made.add_argument("--side", choices=("prefix", "suffix"), required=True, help="which side to write")
    made.add_argument("--out", metavar="FILE", required=True, help="where to, such as edge.safetensors")
    made.add_argument("--no-weights", action="store_true", help="the names and types of the tensors alone")


def _inspect(commands: Commands) -> None:
    made = command(
        commands, "inspect", "show what the file of a half holds: its plans, inputs, what crosses, tensors and versions"
    )
    made.add_argument("file", metavar="FILE", help="what `ariadne save` or runtime.save wrote")
    made.add_argument(
        "--allow", action="append", default=[], metavar="NAME", help="a class that the file may name (module:name)"
    )
    made.add_argument("--brief", action="store_true", help="leave out the ops")


def _doctor(commands: Commands) -> None:
    made = command(
        commands, "doctor", "report torch, devices, compiler, Graphviz and optional packages, and try what works here"
    )
    made.add_argument("--compile", action="store_true", help="also compile a tiny split; takes a minute")


def _completion(commands: Commands) -> None:
    made = command(commands, "completion", "print a completion script for a shell")
    made.add_argument("shell", choices=SHELLS)


def _serve(commands: Commands) -> None:
    made = command(
        commands,
        "serve",
        "serve a suffix from its file, to be run and trained by clients that have its prefix, until it is told to stop",
    )
    made.add_argument("file", metavar="FILE", help="the suffix, as `ariadne save --side suffix` wrote it")
    made.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:7077", help="where (127.0.0.1:7077); port 0: a free one"
    )
    made.add_argument("--threads", type=positive, metavar="N", help="threads that torch may use")
    group = made.add_argument_group("training")
    group.add_argument("--optimizer", metavar="SPEC", help="of torch.optim, such as sgd:lr=0.1,momentum=0.9")
    group.add_argument("--scheduler", metavar="SPEC", help="of torch.optim.lr_scheduler, such as steplr:step_size=30")
    group.add_argument(
        "--loss", metavar="SPEC", help="of torch.nn.functional, such as cross_entropy:label_smoothing=0.1"
    )
    group.add_argument("--checkpoints", metavar="DIR", help="a folder for the checkpoints of training runs")
    group = made.add_argument_group("who may come, and how much")
    group.add_argument(
        "--key", metavar="FILE", help="this server's key (`ariadne keys`); without one, loopback alone is served"
    )
    group.add_argument(
        "--client", action="append", default=[], metavar="FILE", help="a client's public key, or a folder of them"
    )
    group.add_argument("--max-bytes", type=positive, default=256 << 20, metavar="N", help="of one message (268 MB)")
    group.add_argument("--inflight", type=positive, default=8, metavar="N", help="of one client (8)")
    group.add_argument("--waiting", type=positive, default=256, metavar="N", help="requests that wait (256)")
    group.add_argument(
        "--batch",
        type=positive,
        default=1,
        metavar="N",
        help="boundaries that wait run as one, up to so many; rounds otherwise (1)",
    )
    made.add_argument("--metrics", metavar="HOST:PORT", help="show counters for Prometheus at http://HOST:PORT/metrics")
    made.add_argument(
        "--quiet", action="store_true", help="no line for each request on stderr; with --json these are JSON"
    )
    made.add_argument(
        "--allow", action="append", default=[], metavar="NAME", help="a class that the file may name (module:name)"
    )


def _ping(commands: Commands) -> None:
    made = command(commands, "ping", "show what is served at an address, the time of a round trip, and bytes a second")
    made.add_argument("address", metavar="HOST:PORT", help="where a suffix is served")
    made.add_argument("--count", type=positive, default=20, metavar="N", help="round trips (20)")
    made.add_argument(
        "--bytes", type=positive, default=4_000_000, metavar="N", help="sent there and back for the speed (4 MB)"
    )
    _client(made)


def _run(commands: Commands) -> None:
    made = command(
        commands, "run", "run a prefix from its file on inputs, and the suffix at an address on what it gives"
    )
    made.add_argument("file", metavar="FILE", help="the prefix, as `ariadne save --side prefix` wrote it")
    made.add_argument("--to", metavar="HOST:PORT", required=True, help="where its suffix is served")
    made.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SPEC",
        help=f"{HELP}; or FILE.safetensors, whose tensors are the inputs by their sorted names",
    )
    made.add_argument("--batch", type=positive, default=1, metavar="N", help="samples, where inputs are drawn (1)")
    made.add_argument("--count", type=positive, default=1, metavar="N", help="how often (1)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (0)")
    made.add_argument("--out", metavar="FILE", help="write the outputs there, as safetensors")
    _client(made)


def _keys(commands: Commands) -> None:
    made = command(
        commands, "keys", "make a pair of keys: FILE, which stays where it is, and FILE.pub for the other side"
    )
    made.add_argument("file", metavar="FILE", help="where to, such as server.key")


def _client(made: Parser) -> None:
    """Add the options of a client."""
    made.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="how long to wait for an answer (10)"
    )
    made.add_argument("--key", metavar="FILE", help="this client's key")
    made.add_argument("--server-key", metavar="FILE", help="the server's public key")


def _cache(commands: Commands) -> None:
    made = command(
        commands, "cache", "look at the packages that mode='compiled' keeps for the next process, or throw them away"
    )
    made.add_argument("what", choices=CACHE, nargs="?", default="list", help="(list)")
    made.add_argument(
        "bytes",
        type=nbytes,
        nargs="?",
        metavar="SIZE",
        help="of limit: the most they may take, such as 500MB; 0: keep none",
    )


def _parts(commands: Commands) -> None:
    made = model_command(
        commands,
        "parts",
        "show a model in several parts, for a pipeline: balance, bytes across, and idle share under each schedule",
    )
    made.add_argument("--into", type=positive, default=2, metavar="N", help="how many parts (2)")
    made.add_argument(
        "--balance", choices=BALANCES, default="time", help="what the dearest part is to have least of (time)"
    )
    made.add_argument("--microbatches", type=positive, metavar="N", help="micro-batches of a step (twice the parts)")


def depth(text: str) -> int | str | None:
    """A number of modules, `all` as None, or `auto`."""
    if text in ("auto", "all"):
        return "auto" if text == "auto" else None
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a number above 0, 'all' or 'auto'; found {text!r}") from None
