"""Pictures: DOT text by the Graphviz program, SVG as PNG by whichever converter is at hand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ariadne.errors import SpecError, VisualizationError

DOT_FORMATS = ("svg", "pdf", "png")
TEXT_FORMATS = ("dot", "gv")
MOST_SECONDS = 300.0
TEXTS = re.compile(r"<text .*?</text>\n", re.S)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def place(outpath: str | os.PathLike[str] | None, default: str, fileformat: str, known: tuple[str, ...]) -> Path:
    """Where a picture goes: `outpath` with the ending of its format, added where it is not there; folders are made."""
    if fileformat not in known:
        raise SpecError(f"fileformat must be one of {', '.join(map(repr, known))}; found {fileformat!r}")
    if outpath is not None and not isinstance(outpath, (str, os.PathLike)):
        raise SpecError(f"outpath is a path such as 'trace_graph'; found {type(outpath).__name__}")
    path = Path(default if outpath is None else outpath)
    if path.suffix != f".{fileformat}":
        path = path.with_name(f"{path.name}.{fileformat}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def draw(dot: str, path: Path) -> Path:
    """Have Graphviz draw DOT text into a file of the format that its ending names.

    Raises `VisualizationError` where there is no Graphviz, or it fails; the DOT text is then beside where the picture would be.
    """
    program = shutil.which("dot")
    text = path.with_suffix(".dot")
    if program is None:
        text.write_text(dot, encoding="utf-8")
        raise VisualizationError(
            f"cannot draw {str(path)!r}: the Graphviz program 'dot' is not on PATH. The DOT text is in {str(text)!r}: install "
            f"Graphviz (apt-get install graphviz, brew install graphviz) and run: dot -T{path.suffix[1:]} -o {path} {text}"
        )
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _run([program, f"-T{path.suffix[1:]}", "-o", str(draft)], dot)
        if path.suffix == ".svg":
            draft.write_text(titles_above_arrows(draft.read_text(encoding="utf-8")), encoding="utf-8")
        draft.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        text.write_text(dot, encoding="utf-8")
        raise VisualizationError(
            f"cannot draw {str(path)!r}: Graphviz ({program}) {_why(error)}. The DOT text is in {str(text)!r}; a smaller "
            "max_module_depth draws less"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def titles_above_arrows(svg: str) -> str:
    """Graphviz's SVG with the titles of groups drawn last, each with a rim of its group's colour: no arrow strikes them through."""
    found: list[str] = []

    def lift(group: re.Match[str]) -> str:
        fill = re.search(r'<(?:path|polygon) fill="([^"]+)"', group[0])
        rim = "white" if fill is None or fill[1] in ("none", "transparent") else fill[1]
        look = f'<text stroke="{rim}" stroke-width="3" stroke-linejoin="round" paint-order="stroke" '
        found.extend(text.replace("<text ", look, 1) for text in TEXTS.findall(group[0]))
        return TEXTS.sub("", group[0])

    rest = re.sub(
        r'<g id="clust\d+" class="cluster">.*?</g>\n</g>|<g id="clust\d+" class="cluster">.*?</g>',
        lift,
        svg,
        flags=re.S,
    )
    head, end, tail = rest.rpartition("</g>\n</svg>")
    return f'{head}<g class="titles">\n{"".join(found)}</g>\n{end}{tail}' if end and found else svg


def png(svg: str, size: tuple[int, int], path: Path) -> Path:
    """Turn SVG into PNG, by rsvg-convert, Inkscape or Chromium; twice as many dots each way as the SVG has.

    Raises `VisualizationError` where none of them is installed, or it fails; the SVG is then beside where the PNG would be.
    """
    kept = path.with_suffix(".svg")
    found = next(((p, c) for name, c in CONVERTERS.items() if (p := shutil.which(name))), None)
    if found is None:
        kept.write_text(svg, encoding="utf-8")
        raise VisualizationError(
            f"cannot write {str(path)!r}: there is no program that turns SVG into PNG (looked for {', '.join(CONVERTERS)}). The "
            f"picture is in {str(kept)!r} as SVG; install one (apt-get install librsvg2-bin), or ask for fileformat='svg'"
        )
    program, command = found
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "picture.svg"), Path(scratch, "picture.png")
        source.write_text(svg, encoding="utf-8")
        try:
            _run([program, *command(source, target, size)], None)
            shutil.copyfile(target, path)
        except (OSError, subprocess.SubprocessError) as error:
            kept.write_text(svg, encoding="utf-8")
            raise VisualizationError(
                f"cannot write {str(path)!r}: {program} {_why(error)}. The picture is in {str(kept)!r} as SVG"
            ) from error
    return path


def _chromium(source: Path, target: Path, size: tuple[int, int]) -> list[str]:
    window = f"--window-size={size[0]},{size[1]}"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
    return [*quiet, f"--user-data-dir={source.parent}", window, f"--screenshot={target}", source.as_uri()]


CONVERTERS: dict[str, Callable[[Path, Path, tuple[int, int]], list[str]]] = {
    "rsvg-convert": lambda source, target, size: ["--zoom=2", f"--output={target}", str(source)],
    "inkscape": lambda source, target, size: [f"--export-width={2 * size[0]}", f"--export-filename={target}", str(source)],
    **dict.fromkeys(BROWSERS, _chromium),
}  # fmt: skip


def _run(command: list[str], text: str | None) -> None:
    given = None if text is None else text.encode()
    subprocess.run(command, input=given, capture_output=True, check=True, timeout=MOST_SECONDS)


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"was not done within {MOST_SECONDS:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return f"failed with status {error.returncode}{f': {said[-1][:200]}' if said else ''}"
    return f"could not be run: {error}"
