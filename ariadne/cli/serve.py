"""`ariadne serve`: a suffix from its file, for clients that have its prefix."""

from __future__ import annotations

import os
from argparse import Namespace

import torch

from ariadne.cli.options import Commands, command, positive
from ariadne.cli.output import Answer, UsageError
from ariadne.half import load
from ariadne.remote import Limits, Server, until_told

ABOUT = "serve a suffix from its file, to be run and trained by clients that have its prefix, until it is told to stop"


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "serve", ABOUT, run)
    made.add_argument("file", metavar="FILE", help="the suffix, as `ariadne save --side suffix` wrote it")
    made.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:7077", help="where (127.0.0.1:7077); port 0: a free one"
    )
    made.add_argument("--threads", type=positive, metavar="N", help="threads that torch may use")
    group = made.add_argument_group("training")
    group.add_argument("--optimizer", metavar="SPEC", help="of torch.optim, such as sgd:lr=0.1,momentum=0.9")
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
    most = Limits()
    group.add_argument(
        "--max-bytes", type=positive, default=most.bytes, metavar="N", help=f"of one message ({most.bytes})"
    )
    group.add_argument(
        "--inflight", type=positive, default=most.inflight, metavar="N", help=f"of one client ({most.inflight})"
    )
    group.add_argument(
        "--waiting", type=positive, default=most.waiting, metavar="N", help=f"requests that wait ({most.waiting})"
    )
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


def run(options: Namespace) -> Answer:
    """Serve, and say what was served."""
    if not os.path.isfile(options.file):
        raise UsageError(f"there is no file {options.file}")
    if options.threads:
        torch.set_num_threads(options.threads)
    server = Server(
        load(options.file, allow=options.allow, plain=True),
        listen=options.listen,
        optimizer=options.optimizer,
        loss_fn=options.loss,
        checkpoints=options.checkpoints,
        key=options.key,
        clients=options.client,
        limits=Limits(options.max_bytes, options.inflight, options.waiting),
        batch=options.batch,
        log=None if options.quiet else "json" if options.json else "text",
        metrics=options.metrics,
    )
    server.announce()
    until_told(server)
    served = server.served
    return Answer(
        f"{options.file}: {served} requests served at {server.address}", {"address": server.address, "served": served}
    )
