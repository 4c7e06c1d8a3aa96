"""Draws the gallery of the docs, ten models of the zoo: `python docs/site/gallery.py` (minutes), `--check` (a second).

The page says from which sources of drawings it was made; `--check` fails where those have changed since.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import tempfile
from pathlib import Path

import model_zoo
from ariadne.cut import SplitSpec, frontiers
from ariadne.plan import TracePlan
from ariadne.prepare import captured
from ariadne.units import size
from ariadne.visualization import labels, profile, visualize
from ariadne.visualization.chart import standalone
from ariadne.visualization.curve import Point, Profile

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURES = ROOT / "docs/gallery.md", ROOT / "docs/images/gallery"
SOURCES = ("dot", "fit", "fold", "graph", "labels", "parts", "repeat", "chart", "curve", "render")
MOST_CUTS = 5
# Name in the zoo, what it is, and how deep it is drawn.
MODELS = (
    ("torchvision/resnet18", "ResNet-18", 2),
    ("torchvision/mobilenet_v2", "MobileNetV2", 2),
    ("torchvision/efficientnet_b0", "EfficientNet-B0", 2),
    ("timm/convnext_atto", "ConvNeXt Atto", 2),
    ("timm/vit_tiny_patch16_224", "ViT-Tiny", 2),
    ("torchvision/swin_t", "Swin-T", 2),
    ("ultralytics/yolov8n", "YOLOv8n", 1),
    ("transformers/bert_tiny", "BERT, a tiny one", 3),
    ("transformers/gpt2_tiny", "GPT-2, a tiny one", 2),
    ("transformers/whisper_tiny", "Whisper, a tiny one", 2),
)
HEAD = """# Gallery

Ten well-known models, each as Ariadne draws it: its modules with what they make, what crosses at each of its cuts, and the cuts
that send less than the input and than every cut before them. A block that repeats is drawn once, with how often it comes.

Weights are random and images small, so the bytes are those of these inputs. The names are those of the zoo in a clone
(`python -m model_zoo list`); yours goes in the same place. `--out model.html` makes a page whose modules open and close.
"""


def fingerprint() -> str:
    """What the pictures are made from: the code that draws, without its comments and docstrings, and this file's."""
    known = hashlib.sha256()
    for path in [*(ROOT / f"ariadne/visualization/{name}.py" for name in SOURCES), Path(__file__)]:
        parsed = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(parsed):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        known.update(ast.unparse(parsed).encode())
    return known.hexdigest()[:16]


def main() -> None:
    """Write the page and its pictures, or check that the page is of now."""
    if "--check" in sys.argv[1:]:
        found = re.search(r"<!-- made from ([0-9a-f]+) ", PAGE.read_text(encoding="utf-8"))
        if not found or found[1] != fingerprint():
            sys.exit(
                "docs/gallery.md is stale: drawings have changed since; run `python docs/site/gallery.py`, and look at it"
            )
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    sections = [_section(name, title, depth) for name, title, depth in MODELS]
    end = f"<!-- made from {fingerprint()} by docs/site/gallery.py -->\n"
    PAGE.write_text("\n".join([HEAD, *sections, end]), encoding="utf-8")


def _section(name: str, title: str, depth: int) -> str:
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(2)
    plan = captured(entry.build().eval(), args, spec=SplitSpec("auto"), example_kwargs=kwargs).plan
    short = name.partition("/")[2]
    with tempfile.TemporaryDirectory() as folder:
        drawn = visualize(plan, None, outpath=Path(folder, "drawing"), max_module_depth=depth)
        (PICTURES / f"{short}.svg").write_text(_tidy(Path(drawn).read_text(encoding="utf-8")), encoding="utf-8")
    found = profile(plan, frontiers(plan))
    (PICTURES / f"{short}-profile.svg").write_text(standalone(found, 760)[0], encoding="utf-8")
    return _words(name, short, title, depth, plan, found)


def _tidy(svg: str) -> str:
    return re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)


def _words(name: str, short: str, title: str, depth: int, plan: TracePlan, found: Profile) -> str:
    entry_bytes = found.ends.input_bytes
    rows, say = list(found.best), "The best cuts"
    if not rows:
        safe = sorted((p for p in found.points if p.candidate.safe and p.candidate.after), key=_bytes)
        rows, say = safe[:3], "No cut sends less than the input. The smallest that end a module"
    chosen = rows[len(rows) // 2]
    listed = rows if len(rows) <= MOST_CUTS else [*rows[: MOST_CUTS - 1], rows[-1]]
    table = [
        f"| `{p.boundary}` | {size(_bytes(p))} | {_bytes(p) / entry_bytes:.2g} | {p.candidate.cut} of {len(plan.nodes)} |"
        for p in listed
    ]
    return "\n".join(
        [
            f"## {title}",
            "",
            f"    ariadne draw {name} {chosen.boundary} --out {short}.svg",
            "",
            f"{say}, of {len(found.points)}; the input has {size(entry_bytes)} per sample.",
            "",
            "| cut | sends, per sample | times the input | ops before it |",
            "|---|---|---|---|",
            *table,
            "",
            f"In Python: `prepare_split(model, inputs, split={chosen.boundary!r})`.".replace("'", '"'),
            "",
            f"![Bytes per sample across each cut of {title}](images/gallery/{short}-profile.svg)",
            "",
            f"![{title}, {len(plan.nodes)} ops, drawn {labels.counted(depth, 'module')} deep](images/gallery/{short}.svg)",
            "",
        ]
    )


def _bytes(point: Point) -> float:
    return point.candidate.boundary_bytes


if __name__ == "__main__":
    main()
