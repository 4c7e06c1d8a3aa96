"""Searching for programs that fail: one hypothesis run over `draw.programs`, its findings kept and its counts written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from conformance.random_networks.corpus import save
from conformance.random_networks.counts import Counts
from conformance.random_networks.draw import programs
from conformance.random_networks.extent import EXTENT, Extent
from conformance.random_networks.program import Program
from conformance.random_networks.tally import Tally
from conformance.random_networks.trial import trial
from conformance.random_networks.twins import Invalid

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

FIRST_FAILURE = (Phase.generate,)
SMALLEST_FAILURE = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # to explain one costs as much again


class Found(AssertionError):
    """A program whose split differs from the whole; the message prints it and says how to replay it."""

    def __init__(self, program: Program, error: Exception, path: Path | None) -> None:
        where = f"\nreplay: python -m conformance.random_networks {path}" if path else ""
        super().__init__(f"{error}\n{program}{where}")
        self.program = program


def search(
    chosen: settings, tally: Tally, keep: Path | None, held: Callable[[Program, Extent], Counts] = trial
) -> Tally:
    """Try programs under these settings by `held`; the tally of what ran.

    Raises `Found` with the smallest program that fails, which is saved in the folder `keep`, if there is one.
    """
    failing: list[tuple[Program, Exception]] = []

    @settings(chosen, suppress_health_check=QUIET, report_multiple_bugs=False)
    @given(programs(EXTENT.steps, named=EXTENT.named))
    def hold(program: Program) -> None:
        try:
            counts = held(program, EXTENT)
        except Invalid:
            if not failing:
                tally.counts["invalid"] += 1
        except Exception as error:
            failing.append((program, error))
            raise
        else:
            if not failing:  # what is tried to make a failing program smaller is no search
                tally.add(counts, program)

    try:
        hold()
    except Exception as raised:
        tally.counts["failures"] += 1
        if not failing:
            raise
        program, error = failing[-1]  # hypothesis ends with the smallest that it found
        raise Found(program, error, save(program, keep) if keep else None) from raised
    finally:
        tally.write()
    return tally
