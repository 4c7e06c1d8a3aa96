"""What can go wrong when a model is asked for.

KeyError
└── UnknownNameError      no such model, family or tag
ImportError
└── MissingPackageError   the model's library is not installed
"""

import difflib
from collections.abc import Iterable


class UnknownNameError(KeyError):
    """No such model, family or tag; the message lists the nearest names that exist."""

    def __init__(self, kind: str, asked: str, known: Iterable[str]) -> None:
        self.nearest = nearest(asked, known)
        hint = f"Nearest: {', '.join(repr(name) for name in self.nearest)}." if self.nearest else "Nothing is near it."
        super().__init__(f"no {kind} named {asked!r} in the zoo. {hint} `python -m model_zoo list` shows all.")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr


class MissingPackageError(ImportError):
    """The library that defines a model is not installed; the message says how to install it."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"this model is defined by the package {package!r}, which is not installed. "
            f"Install it with `pip install ariadne-runtime[zoo]`, or {package!r} alone.",
            name=package,
        )


def nearest(asked: str, known: Iterable[str], count: int = 4) -> tuple[str, ...]:
    """The known names most like the asked one, best first; a name is also known by its part after the slash."""
    wanted = asked.lower()

    def likeness(name: str) -> float:
        return max(difflib.SequenceMatcher(None, wanted, form).ratio() for form in (name, name.rpartition("/")[2]))

    close = sorted(((likeness(name), name) for name in known), key=lambda pair: (-pair[0], pair[1]))
    return tuple(name for ratio, name in close[:count] if ratio >= 0.5)
