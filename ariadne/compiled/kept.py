"""Packages kept for the next process: where they lie, who may write there, and which are thrown away first.

A package is native code, so a folder of them must belong to the user, and nobody else may write to it or to what leads there.
The package is called by a digest of its own bytes; a card beside it, which is put there last and in one move, says what it was
made for, and for which batches. So two processes may write at once: each card leads to a whole package, or is told from one
that does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ariadne.errors import SpecError
from ariadne.plan import Batches

if sys.platform != "win32":
    import grp
    import pwd

FORMAT = 2
LIMIT = 2 * 2**30  # bytes that the user's own folder holds at most, unless `limit` was set
_LIMIT_FILE = "limit.json"
_OURS = re.compile(r"\.?ariadne-[0-9a-f]{32}[-0-9a-z]*\.(pt2|json)(\.draft-\w+)?")
_STRAY = 3600.0  # seconds after which a package without a card, or a draft, is nobody's any more


def user_folder() -> Path:
    """Where packages are kept if nothing is said: `ARIADNE_CACHE_DIR`, or `ariadne` in the user's cache folder.

    The user's cache folder is `$XDG_CACHE_HOME` where that is an absolute path, else `~/.cache`; on macOS `~/Library/Caches`, on
    Windows `%LOCALAPPDATA%`.
    """
    named = os.environ.get("ARIADNE_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ariadne" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ariadne"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "ariadne"


@dataclass(frozen=True)
class Card:
    """What is known of a kept package: where its card lies, the package, how large both are, when it was last used."""

    path: Path
    package: Path
    size: int
    used: float
    told: dict[str, Any]

    @property
    def batches(self) -> Batches:
        """The batches that it serves."""
        return Batches(tuple((int(lo), int(hi)) for lo, hi in self.told["batches"]))

    def touch(self) -> None:
        """Note that it was used now."""
        with contextlib.suppress(OSError):  # of a folder that is only read, or a card that another process threw away
            os.utime(self.path)


@dataclass(frozen=True)
class Broken:
    """What lies in place of a card, and why it is none; the package that it led to is not known."""

    path: Path
    why: Exception
    package: Path | None = None


class Kept:
    """A folder of packages; `bounded`: the user's own, of which the oldest-used are thrown away where it grows too large.

    >>> Kept.of_user().path.name
    'ariadne'
    """

    def __init__(self, path: str | os.PathLike[str], *, bounded: bool = False) -> None:
        # What links lead to: a link that others can move leads elsewhere after it was looked at.
        self.path, self.bounded = Path(os.path.realpath(path)), bounded

    @classmethod
    def of_user(cls) -> Kept:
        """The user's own folder."""
        return cls(user_folder(), bounded=True)

    # --- trust ----------------------------------------------------------------------------------------------------

    def trusted(self) -> Kept:
        """This folder, if it is there, belongs to the user, and others can't write to it; else `SpecError`.

        Where there is no folder yet, what leads to its place is looked at. On Windows nothing is: there the folder's own
        access list decides.
        """
        if sys.platform == "win32":
            return self
        for place in (self.path, *self.path.parents):
            try:
                found = place.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise SpecError(self._refused(place, f"can't be looked at ({error.strerror})")) from error
            self._examine(place, found)
        return self

    def _examine(self, place: Path, found: os.stat_result) -> None:
        if not _is_ours(found):
            raise SpecError(self._refused(place, f"belongs to another user ({found.st_uid})"))
        # In a folder such as /tmp nobody moves what is another's; in the packages' own folder others could still put files.
        if _open_to_others(found) and (place == self.path or not found.st_mode & stat.S_ISVTX):
            raise SpecError(self._refused(place, f"can be written to by others ({stat.filemode(found.st_mode)})"))

    def _refused(self, place: Path, why: str) -> str:
        whose = "" if place == self.path else f", on the way to {self.path}"
        return (
            f"no packages are taken from {self.path}: {place}{whose} {why}, and packages are native code, which would be loaded "
            "and run. Make it yours alone (chown, chmod go-w), or set ARIADNE_CACHE_DIR (or cache_dir) to a folder that is"
        )

    # --- what is there --------------------------------------------------------------------------------------------

    def cards(self, name: str = "") -> list[Card]:
        """The packages here, of this name or all, the one used longest ago first; what is no card is left out."""
        found = []
        for path in self._files():
            if path.suffix == ".json" and path.name.startswith(f"ariadne-{name[:32]}"):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    found.append(self._card(path))
        return sorted(found, key=lambda card: (card.used, card.path.name))

    def named(self, name: str) -> Iterator[Card | Broken]:
        """The packages of this name, and what lies in place of one."""
        for path in sorted(self._files()):
            if path.suffix == ".json" and path.name.startswith(f"ariadne-{name[:32]}"):
                try:
                    card = self._card(path)
                    if card.told["name"] != name or card.told["format"] != FORMAT:
                        raise ValueError("it was made for something else")
                    _ = card.batches
                    yield card
                except Exception as error:  # whatever there is in place of a card
                    yield Broken(path, error)

    def _card(self, path: Path) -> Card:
        told = json.loads(_mine(path))
        package = path.with_name(str(told["package"]))
        if not _OURS.fullmatch(package.name) or package.parent != self.path:
            raise ValueError("its package lies elsewhere")
        there = path.stat()
        size = package.stat().st_size if package.exists() else 0
        return Card(path, package, there.st_size + size, there.st_mtime, dict(told))

    def _files(self) -> list[Path]:
        """The files here that are ours by name."""
        try:
            return [self.path / name for name in os.listdir(self.path) if _OURS.fullmatch(name)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def size(self) -> int:
        """Bytes of all files here that are ours."""
        return sum(_size(path) for path in self._files())

    # --- keeping --------------------------------------------------------------------------------------------------

    def checked(self, card: Card) -> str:
        """The path of a card's package; ValueError where its bytes are others by now."""
        if hashlib.sha256(_mine(card.package)).hexdigest() != card.told["sha256"]:
            raise ValueError("its bytes are not those that were written")
        return str(card.package)

    def keep(self, name: str, made: str, batches: Batches, hint: int, about: str) -> str:
        """Put a package here that was made from the batch `hint`, and its card last; returns why it was not kept, or nothing.

        Raises `OSError` where it can't be written.
        """
        data = Path(made).read_bytes()
        if self.bounded and len(data) > self.limit:
            return f"it has {len(data)} bytes, and the cache holds {self.limit} (ariadne cache limit)"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.trusted()
        digest = hashlib.sha256(data).hexdigest()
        package = f"ariadne-{name[:32]}-{digest[:32]}.pt2"
        told = {
            "format": FORMAT,
            "name": name,
            "package": package,
            "sha256": digest,
            "batches": batches.ranges,
            "about": about,
        }
        self._put(package, data)
        self._put(f"ariadne-{name[:32]}-from-{hint}.json", json.dumps(told).encode())
        if self.bounded:
            self.prune()
        return ""

    def _put(self, name: str, data: bytes) -> None:
        handle, draft = tempfile.mkstemp(prefix=f"{name}.draft-", dir=self.path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(draft, self.path / name)
        except BaseException:
            _remove(Path(draft))
            raise

    def prune(self) -> int:
        """Throw away what nobody uses any more, then what was used longest ago, until the rest fits; returns how many bytes."""
        before, limit, cards = self.size, self.limit, self.cards()
        known = {path for card in cards for path in (card.path, card.package)}
        for path in self._files():
            with contextlib.suppress(OSError):
                if path not in known and time.time() - path.stat().st_mtime > _STRAY:
                    _remove(path)
        size = self.size
        for card in cards:
            if size <= limit:
                break
            size -= self.drop(card)
        return before - self.size

    def drop(self, card: Card | Broken) -> int:
        """Throw a package away, its card first; returns how many bytes."""
        return _remove(card.path) + (_remove(card.package) if card.package else 0)

    def clear(self) -> int:
        """Throw all packages away; returns how many bytes. Files that are not ours stay."""
        return sum(_remove(path) for path in self._files())

    @property
    def limit(self) -> int:
        """How many bytes the packages here may take."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return max(0, int(json.loads(_mine(self.path / _LIMIT_FILE))["bytes"]))
        return LIMIT

    @limit.setter
    def limit(self, size: int) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.trusted()
        self._put(_LIMIT_FILE, json.dumps({"bytes": size}).encode())


def _is_ours(found: os.stat_result) -> bool:
    """Whether something belongs to the user, or to the administrator, who may do anything anyway."""
    return sys.platform == "win32" or found.st_uid in (os.geteuid(), 0)


def _open_to_others(found: os.stat_result) -> bool:
    """Whether somebody else may write: anybody, or a group that is more than the user."""
    if sys.platform == "win32":
        return False
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private(found.st_gid)


def _is_private(group: int) -> bool:
    """Whether a group is the user's own, as systems have it that give each user one: its name, and nobody else in it."""
    if sys.platform == "win32":
        return True
    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return bool(found.gr_name == name and set(found.gr_mem) <= {name})


def _mine(path: Path) -> bytes:
    """The bytes of a file; ValueError where somebody else wrote it, or could."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if not _is_ours(found) or _open_to_others(found):
            raise ValueError("it belongs to another user, or others can write to it")
        return file.read()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # thrown away by another process
        return 0


def _remove(path: Path) -> int:
    """Take a file away; returns how many bytes, none where it was gone or can't be moved."""
    size = _size(path)
    try:
        path.unlink()
    except OSError:
        return 0
    return size
