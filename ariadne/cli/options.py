"""The options that commands share, and how what was typed becomes their values."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ariadne.cli.output import USAGE, UsageError

if TYPE_CHECKING:
    from ariadne.cut import BatchDim  # which imports torch, and lines are answered without it

EXITS = """exit status:
  0    done; of a check: nothing failed, and something was compared
  1    a check failed, or could not show equality; something that `doctor` tried does not work
  2    an invalid command, option, input or model
  3    the model can't be made or run, or no plan, cut or picture of it can be made; the message says why
  130  interrupted;  141  the reader of the output closed it
Errors are one line on stderr; --traceback shows where they came from."""
FORMS = "package.module:factory, path/to/file.py:factory, or a name of model_zoo such as torchvision/resnet18"
FORM = "[NAME=]SIZES[:DTYPE][:LOW..HIGH][:fixed]"
HELP = (
    f"an input of forward, {FORM}: sizes of one sample, the batch is put in front (3x224x224; nothing before the colon "
    "for one number per sample, :int64:0..9); dtype float32 unless another is given (16:int64:0..1000); floats are drawn "
    "from a normal distribution, or "
    "evenly from LOW to HIGH; integers from LOW up to HIGH, which is left out (0..2 if not said); NAME= passes it as a keyword; "
    "fixed: without the batch; NAME=True, False or None passes that. Repeat for more inputs, in forward's order"
)
MODES = ("debug_interpreter", "generated_eager", "compiled")
_DYNAMIC = (
    "a size beside the batch that may change: the input by forward's own name for it, the dim, and the sizes that it may have "
    "(x:2=64..512/32: from 64 to 512 in steps of 32; x:2: any). Inputs that share a size give it one name: ids:1=L:1..512 and "
    "mask:1=L. Repeat for each dim"
)
_BATCH_DIM = (
    "the dim that is the batch, for an input where it is not dim 0, such as x=1 for (time, batch, features), by forward's own name "
    "for it; x=none: it has no batch; none alone: no input has one. --input still gives the sizes of one sample. Repeat for "
    "each input"
)
_PICTURES = frozenset("bmp dot eps gif gv htm html jpeg jpg pdf png ps svg tif tiff webp".split())
_ABOUT = (
    "Look at a PyTorch model, see where it can be split in two, and check on your machine that the split equals it."
)
_MODEL = f"the model: {FORMS}. A factory takes no arguments and returns a model, (model, args) or (model, args, kwargs)"
Commands = Any  # argparse's own type of sub-commands has no public name


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on one line, and exit with status 2."""
        sys.stderr.write(f"ariadne: {' '.join(message.split())} (see {self.prog} --help)\n")
        raise SystemExit(USAGE)


def top() -> tuple[Parser, Commands]:
    """The parser of the command line, and where commands are added to it."""
    form = argparse.RawDescriptionHelpFormatter
    root = Parser("ariadne", description=_ABOUT, epilog=EXITS, formatter_class=form, allow_abbrev=False)
    return root, root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)


def command(commands: Commands, name: str, about: str) -> Parser:
    """A command without a model."""
    made: Parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    made.set_defaults(of=made)
    made.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    made.add_argument("--traceback", action="store_true", help="with an error, show where it came from")
    return made


def model_command(commands: Commands, name: str, about: str) -> Parser:
    """A command about a model, with the options that say which, and on what inputs."""
    made = command(commands, name, about)
    made.add_argument("model", metavar="MODEL", help=_MODEL)
    group = made.add_argument_group("the model and its inputs")
    group.add_argument("--input", action="append", default=[], metavar="SPEC", help=HELP)
    group.add_argument("--batch", type=positive, metavar="N", help="batch of the example inputs (2, or as they come)")
    group.add_argument(
        "--dynamic-batch", type=batch_range, metavar="LOW..HIGH", help="the batches to serve, both included (1..64)"
    )
    group.add_argument(
        "--dynamic", action="append", default=[], type=dynamic, metavar="INPUT:DIM[=SIZES]", help=_DYNAMIC
    )
    group.add_argument("--batch-dim", action="append", default=[], type=batch_dim, metavar="INPUT=DIM", help=_BATCH_DIM)
    group.add_argument("--train", action="store_true", help="the model in training mode (without: in eval mode)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights, inputs and draws (0)")
    return made


def mode(made: Parser) -> None:
    """Add `--mode`."""
    made.add_argument("--mode", choices=MODES, default="generated_eager", help="how the halves run (generated_eager)")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0; found {text!r}")
    return int(text)


def nbytes(text: str) -> int:
    """`500MB`, `2GiB` or `1000` as a number of bytes."""
    found = re.fullmatch(r"(?P<number>\d{1,15}(?:\.\d{1,6})?) ?(?P<unit>[kKMGT]?i?)B?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB, 2GiB or a number of bytes; found {text!r}")
    unit = found["unit"].upper()
    step = 1024 if unit.endswith("I") else 1000
    return int(float(found["number"]) * step ** " KMGT".index(unit[:1] or " "))


def _batch(text: str) -> int:
    """A batch, from 0."""
    return 0 if text == "0" else positive(text)


def batch_range(text: str) -> tuple[int, int]:
    """`1..64` as (1, 64), and `8` as (8, 8)."""
    low, dots, high = text.partition("..")
    found = _batch(low), positive(high if dots else low)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"must be LOW..HIGH with LOW not above HIGH; found {text!r}")
    return found


@dataclass(frozen=True)
class Dynamic:
    """A size beside the batch that may change, as it was typed: dim `dim` of `input`, its symbol, and its range or None."""

    input: str
    dim: int
    symbol: str
    within: tuple[int, ...] | None
    text: str


_DIM = re.compile(
    r"(?P<input>[^\W\d]\w*):(?P<dim>\d{1,2})"
    r"(?:=(?P<symbol>[^\W\d]\w*)?(?::(?=\d))?(?:(?P<low>\d{1,9})\.\.(?P<high>\d{1,9})(?:/(?P<step>\d{1,9}))?)?)?"
)


def dynamic(text: str) -> Dynamic:
    """`x:2=64..512/32` as dim 2 of `x`, called x_2, from 64 to 512 in steps of 32; `ids:1=L:1..512` is called L."""
    found = _DIM.fullmatch(text)
    if found is None or text.endswith("="):
        raise argparse.ArgumentTypeError(
            f"must be INPUT:DIM, INPUT:DIM=LOW..HIGH/STEP or INPUT:DIM=NAME:LOW..HIGH/STEP, such as x:2=64..512/32; found {text!r}"
        )
    within = tuple(int(found[key]) for key in ("low", "high", "step") if found[key]) if found["low"] else None
    return Dynamic(
        found["input"], int(found["dim"]), found["symbol"] or f"{found['input']}_{found['dim']}", within, text
    )


def batch_dim(text: str) -> tuple[str, int | None]:
    """`x=1` as ("x", 1), and `x=none` as ("x", None); `none`, by which no input has a batch, as ("", None)."""
    if text == "none":
        return "", None
    found = re.fullmatch(r"(?P<input>[^\W\d]\w*)=(?P<dim>\d{1,2}|none)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be INPUT=DIM or INPUT=none, such as x=1, or none; found {text!r}")
    return found["input"], None if found["dim"] == "none" else int(found["dim"])


def along(given: Sequence[tuple[str, int | None]]) -> BatchDim | None:
    """What `SplitSpec.batch_dim` is for what was typed."""
    return "none" if ("", None) in given else dict(given) or None


def sizes(given: Sequence[Dynamic], batch_dims: Sequence[tuple[str, int | None]]) -> dict[str, Any]:
    """What `SplitSpec` takes for the sizes that were typed, and for where the batch is."""
    dims: dict[str, dict[int, str]] = {}
    ranges: dict[str, tuple[int, ...]] = {}
    for one in given:
        dims.setdefault(one.input, {})[one.dim] = one.symbol
        if one.within is not None and ranges.setdefault(one.symbol, one.within) != one.within:
            raise UsageError(f"--dynamic {one.text}: {one.symbol} has another range already; give it once")
    return {"dynamic": dims or None, "sizes": ranges or None, "batch_dim": along(batch_dims)}


def batches(text: str) -> list[int]:
    """`1,2,3` as whole numbers, each once."""
    return list(dict.fromkeys(_batch(part.strip()) for part in text.split(",")))


def words(text: str) -> list[str]:
    """`a,b` as its parts, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def boundary(text: str) -> str:
    """A cut as it is typed: any boundary string, a bare number of ops, or q25, q50, q75."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return f"cut:{int(text)}"
    return f"percent:{text[1:]}" if text[:1] == "q" and text[1:].isdigit() else text


def outfile(out: str | None, form: str | None, known: Sequence[str]) -> tuple[str | None, str]:
    """Where a picture goes, and its format: the one asked for, else that of the path's ending, else svg."""
    if out and not Path(out).parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {Path(out).parent}; make it first, or choose another")
    ending = Path(out or "").suffix.removeprefix(".")
    if not form and ending.lower() in _PICTURES and ending not in known:
        raise UsageError(f"--out {out}: no {ending} can be made; there are {', '.join(known)}")
    return out, form or (ending if ending in known else "svg")


def again(options: argparse.Namespace, *more: str) -> str:
    """The command line that does the same for the same model, with other options after it."""
    line = ["ariadne", options.command, options.model]
    for text in options.input:
        line += ["--input", text]
    if options.batch:
        line += ["--batch", str(options.batch)]
    if options.dynamic_batch:
        line += ["--dynamic-batch", "{}..{}".format(*options.dynamic_batch)]
    for one in options.dynamic:
        line += ["--dynamic", one.text]
    for name, dim in options.batch_dim:
        line += ["--batch-dim", f"{name}={'none' if dim is None else dim}" if name else "none"]
    line += ["--train"] if options.train else []
    line += ["--seed", str(options.seed)] if options.seed else []
    return shlex.join([*line, *more])
