"""Keys: who may talk to a server, by the CURVE keys of ZeroMQ. Without keys a server listens on loopback alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ariadne.errors import SpecError
from ariadne.remote.link import curve_pair

_LINE = re.compile(r"(public|secret) (\S{40})")
_ABOUT = "# a key of Ariadne; the file with `secret` in it stays where it was made\n"


class Key(NamedTuple):
    """A public key, and the secret one that belongs to it, or ""."""

    public: str
    secret: str = ""


def make(path: str | os.PathLike[str]) -> Key:
    """Write a new pair of keys: `path` holds the secret one, readable by its owner alone, `path`.pub the public one.

    Raises `SpecError` where there is such a file already.

    >>> make("edge.key").public
    'C:0=6u7kGmMZ.D(?W4gu5yjQ}3k]e1ASp>Y1UsDl'
    """
    secret, public = Path(path), Path(f"{os.fspath(path)}.pub")
    taken = next((p for p in (secret, public) if p.exists()), None)
    if taken is not None:
        raise SpecError(f"there is a file {taken} already; a key that is in use is not overwritten. Name another")
    key = Key(*curve_pair())
    handle = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{_ABOUT}public {key.public}\nsecret {key.secret}\n")
    public.write_text(f"{_ABOUT}public {key.public}\n", encoding="ascii")
    return key


def read(path: str | os.PathLike[str]) -> Key:
    """The key in a file; `SpecError` where it holds none."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the key {os.fspath(path)} can't be read: {error}; `ariadne keys FILE` makes one") from None
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {m[1]: m[2] for line in lines if (m := _LINE.fullmatch(line))}
    if len(found) != len(lines) or "public" not in found:
        raise SpecError(f"{os.fspath(path)} is no key; `ariadne keys FILE` makes one")
    return Key(found["public"], found.get("secret", ""))


def secret(path: str | os.PathLike[str]) -> Key:
    """The pair of keys in a file; `SpecError` where the secret one is missing."""
    key = read(path)
    if not key.secret:
        raise SpecError(f"{os.fspath(path)} holds a public key alone; name the file with the secret one")
    return key


def allowed(paths: Iterable[str | os.PathLike[str]]) -> frozenset[str]:
    """The public keys of those who may come: each path a file, or a folder of `.pub` files."""
    found = set()
    for path in paths:
        files = sorted(Path(path).glob("*.pub")) if Path(path).is_dir() else [Path(path)]
        if not files:
            raise SpecError(f"the folder {os.fspath(path)} holds no .pub file")
        found |= {read(p).public for p in files}
    return frozenset(found)
