"""State of the process that building a model must leave as it found it."""

import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under seeded RNGs (torch's CPU generator, `random`, numpy's); their states are put back after it."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also reseed the accelerators, whose states are not forked here.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block that imports or calls a library; its warnings and what it sets globally in torch don't outlast it."""
    precision, save, load = torch.get_float32_matmul_precision(), torch.save, torch.load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)  # `import rfdetr` sets "high", which is TF32 on CUDA
            torch.save, torch.load = save, load  # `import ultralytics` replaces torch.save


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Run a block in which the named logger says nothing below an error."""
    named = logging.getLogger(logger)
    level = named.level
    named.setLevel(logging.ERROR)
    try:
        yield
    finally:
        named.setLevel(level)
