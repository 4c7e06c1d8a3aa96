"""Draws the rooms of `ariadne/` from their imports, and finds the lines of the tour: `python docs/site/rooms.py [--check]`.

An arrow goes from a room to one that it imports. One that also goes by way of others is left out.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, PICTURE, TOUR = ROOT / "ariadne", ROOT / "docs/images/rooms.svg", ROOT / "docs/architecture.md"
WIDE, HIGH, GAP, FLOOR = 148, 40, 36, 92  # of a box, between boxes, from floor to floor


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The rooms that each room imports: packages, and the modules that stand beside them."""
    names = {p.stem for p in package.iterdir() if (p.suffix == ".py" or (p / "__init__.py").exists())}
    names = {name for name in names if not name.startswith("_")}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room not in names:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "ariadne":
                found[room] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ariadne."):
                found[room].add((node.module or "").split(".")[1])
            elif isinstance(node, ast.Import):
                found[room] |= {a.name.split(".")[1] for a in node.names if a.name.startswith("ariadne.")}
    return {room: (others & names) - {room} for room, others in found.items()}


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """How many rooms lie below each on its longest way down; raises `SystemExit` where rooms import each other in a circle."""
    known: dict[str, int] = {}
    while len(known) < len(imports):
        ready = {
            r: 1 + max((known[o] for o in os), default=-1)
            for r, os in imports.items()
            if r not in known and os <= known.keys()
        }
        if not ready:
            raise SystemExit(
                f"these rooms import each other in a circle: {', '.join(sorted(imports.keys() - known.keys()))}"
            )
        known |= ready
    return known


def direct(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that lead nowhere by way of others."""
    below: dict[str, set[str]] = {}
    for room in sorted(imports, key=floors(imports).__getitem__):
        below[room] = imports[room].union(*(below[o] for o in imports[room]))
    return sorted((r, o) for r, others in imports.items() for o in others if not any(o in below[x] for x in others))


def draw(imports: dict[str, set[str]]) -> str:
    """The picture, as SVG; the top floor is what a user calls."""
    floor = floors(imports)
    rows: dict[int, list[str]] = {}
    for room in sorted(imports):
        rows.setdefault(floor[room], []).append(room)
    width = max(map(len, rows.values())) * (WIDE + GAP) + GAP
    top = max(rows)
    at: dict[str, tuple[float, float]] = {}
    for level, row in rows.items():
        left = (width - len(row) * (WIDE + GAP) + GAP) / 2
        for i, room in enumerate(row):
            at[room] = left + i * (WIDE + GAP), 20 + (top - level) * FLOOR
    arrows, boxes = [], []
    for room, other in direct(imports):
        (x, y), (u, v) = at[room], at[other]
        x, u, y = x + WIDE / 2, u + WIDE / 2, y + HIGH
        bend = (v - y) / 2
        side = 0.0 if floor[room] - floor[other] == 1 or abs(x - u) > 1 else WIDE * 0.9
        curve = f"M{x:.0f},{y:.0f} C{x + side:.0f},{y + bend:.0f} {u + side:.0f},{v - bend:.0f} {u:.0f},{v:.0f}"
        arrows.append(f'<path d="{curve}" marker-end="url(#tip)"/>')
    for room, (x, y) in sorted(at.items()):
        files = len(list((PACKAGE / room).rglob("*.py"))) - 1 if (PACKAGE / room).is_dir() else 0
        label = f"{room}/" if files else room
        boxes.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDE}" height="{HIGH}" rx="6"/>')
        boxes.append(f'<text x="{x + WIDE / 2:.0f}" y="{y + HIGH / 2 + 5:.0f}">{label}</text>')
    height = 20 + top * FLOOR + HIGH + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            "<title>The rooms of ariadne/, and which imports which</title>",
            "<style>rect{fill:#f4f6fb;stroke:#3f51b5}text{font:14px sans-serif;text-anchor:middle;fill:#1a237e}"
            "path{fill:none;stroke:#7986cb;stroke-width:1.2}#tip path{fill:#7986cb}svg{background:#fff}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            *arrows,
            *boxes,
            "</svg>",
            "",
        ]
    )


def toured(page: str) -> str:
    """The page with the line where each `file:line` `name` of its tour is defined; raises `SystemExit` where it is not."""

    def found(match: re.Match[str]) -> str:
        file, name = match.groups()
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return f"`{file}:{node.lineno}` `{name}`"
        raise SystemExit(f"{TOUR.name} names {name!r} of {file}, which is not there")

    return re.sub(r"`([\w/]+\.py):\d+` `(\w+)`", found, page)


def main(arguments: list[str]) -> int:
    """Write the picture and the page; or with `--check` say whether one that is kept is stale."""
    made = {PICTURE: draw(rooms()), TOUR: toured(TOUR.read_text(encoding="utf-8"))}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if arguments == ["--check"]:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is stale; run python docs/site/rooms.py\n")
        return bool(stale)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
