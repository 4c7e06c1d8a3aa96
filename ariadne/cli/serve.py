"""`ariadne serve`: a suffix from its file, for clients that have its prefix."""

from __future__ import annotations

import os
from argparse import Namespace

import torch

from ariadne.cli.output import Answer, UsageError
from ariadne.half import load
from ariadne.remote import Limits, Server, until_told


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
        scheduler=options.scheduler,
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
