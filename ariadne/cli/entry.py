"""The entry: one command is chosen, run and answered for."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from ariadne.cli.grammar import parser
from ariadne.cli.output import NO_PLAN, USAGE, ModelError, UsageError, paint
from ariadne.errors import AriadneError, SpecError
from ariadne.imports import imported

INTERRUPTED, CLOSED = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `ariadne --help` says what each means."""
    root = parser()
    options, unknown = root.parse_known_args(argv)
    if unknown:
        options.of.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.parser = root
    try:
        # What a model prints, as it is imported or run, is no part of the answer.
        with contextlib.redirect_stdout(sys.stderr):
            answer = imported(f"ariadne.cli.{options.command}").run(options)
        sys.stdout.write(answer.json() if options.json else paint(answer.text) + "\n")
        sys.stdout.flush()
        return int(answer.status)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, False)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (UsageError, SpecError) as error:
        return _fail(str(error), USAGE, options.traceback)
    except (AriadneError, ModelError) as error:
        return _fail(str(error), NO_PLAN, options.traceback)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return _fail(words if options.traceback else f"{words} (--traceback shows where)", NO_PLAN, options.traceback)


def _fail(words: str, status: int, show: bool) -> int:
    if show:
        traceback.print_exc()
    sys.stderr.write(f"ariadne: {' '.join(words.split())}\n")
    return status
