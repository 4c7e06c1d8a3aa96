"""`ariadne keys`: a new pair of keys for a server or a client."""

from __future__ import annotations

from argparse import Namespace

from ariadne.cli.output import Answer
from ariadne.remote import make_key


def run(options: Namespace) -> Answer:
    """Make them."""
    key = make_key(options.file)
    text = f"{options.file}      secret: stays here\n{options.file}.pub  public: give it to the other side"
    return Answer(text, {"file": options.file, "public": key.public})
