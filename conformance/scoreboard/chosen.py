"""Which models the published board is about: every toy but those of `ariadne.opaque`, and sixty of the zoo.

The sixty follow a rule that no system's answers have a say in. `ariadne.opaque` is a mark of one system, so its toys ask the others
nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import model_zoo
from conformance.scoreboard.programs import QUICK

SMALL = ("toys", "nn")
OWN = "toys/opaque_"  # toys of a mark that one system alone knows
OF_THE_ZOO = 60
FILE = Path(__file__).parent / "parameters.json"
# How many parameters each of the zoo's models has, kept here since counting them takes minutes: `... scoreboard count`.
PARAMETERS: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))


def count() -> None:
    """Build each of the zoo's models, and keep how many parameters it has."""
    names = [name for name in model_zoo.names() if name.partition("/")[0] not in SMALL]
    found = {name: sum(p.numel() for p in model_zoo.entry(name).build().parameters()) for name in names}
    FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


def board() -> list[str]:
    """The toys, then the chosen models of the zoo, each in the order of a digest of their names: the first n are a fair sample."""
    toys = [name for name in model_zoo.names() if name.partition("/")[0] in SMALL and not name.startswith(OWN)]
    return [*_mixed([*QUICK, *toys]), *_mixed(of_the_zoo())]


def _mixed(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def of_the_zoo(count: int = OF_THE_ZOO) -> list[str]:
    """The models with the fewest parameters of each library, as many of each as its share of the zoo says."""
    libraries: dict[str, list[str]] = defaultdict(list)
    for name in sorted(PARAMETERS, key=lambda name: (PARAMETERS[name], name)):
        libraries[name.partition("/")[0]].append(name)
    exact = {library: count * len(names) / len(PARAMETERS) for library, names in libraries.items()}
    shares = {library: int(share) for library, share in exact.items()}
    for library in sorted(exact, key=lambda library: shares[library] - exact[library])[: count - sum(shares.values())]:
        shares[library] += 1
    return sorted(name for library, names in libraries.items() for name in names[: shares[library]])
