"""What the zoo knows about a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from model_zoo.losses import loss
from model_zoo.process import seeded, undisturbed
from model_zoo.sampling import Inputs, Sampler
from model_zoo.weights import randomise, settle_batch_norms

COSTS = frozenset({"cheap", "medium", "heavy"})
NONDETERMINISTIC = "nondeterministic"


@dataclass(frozen=True)
class Entry:
    """A model by name: how to make it, what to feed it, and what it is like.

    The tags name

    - a task ("classification", "detection", "segmentation", "pose", "flow", "features", "generation") and perhaps what
      it is about ("video", "language", "audio"); or "toy";
    - one cost, that of a training step at batch 2 on one CPU thread: "cheap" to 0.1 s, "medium" to 0.5 s, then "heavy";
    - what a check may want to choose by. About the inputs: "kwargs" (some go by keyword), "list-input" (a list with an
      item for each row), "int-input", "none-input", "plain-input" (a number, bool or string), "half" (bfloat16
      throughout). Every tensor among them has the batch first, or stands in such a list.
      About the outputs: "int-output", "varying-output" (their number or sizes depend on data).
      About the rows: "rows-mixed" (in eval mode, what comes out for a row depends on which rows are with it).
      About state: "batchnorm" (keeps running statistics), "state" (a forward moves other buffers or attributes), "draws"
      (a training forward draws from a global generator), "draws-in-eval" (so does one in eval mode), "own-generator"
      (draws from a generator that the model holds), "writes-input" (writes into an input of its caller's),
      "no-input-gradients" (in training mode, forward raises where an input wants gradients).
      About parameters: "tied" (one stands in two places), "frozen" (some need no gradient), "unused" (in a training
      step, some that need a gradient get None or zeros).
      About control: "data-dependent" (Python reads values out of tensors, or a size depends on them), "grad-mode" (in
      eval mode, a forward that records no gradients gives other bits), "caches-graph" (in eval mode, the first forward
      keeps part of its graph for the next: a second backward pass fails), "no-double" (does not run in float64),
      "no-autocast" (in bfloat16, a kernel of torch's reads memory that nobody wrote: a training step may differ from itself),
      "nondeterministic" (two equal runs differ).
      About plans: "no-graph" (no plan holds its forward, which is split as the model's own Python), "no-graph-in-training" (so is
      that in training mode alone).
      About what is tried: "compiled" (its training step is compiled by inductor, too, which takes a minute), "compiled-in-part" (a
      compiler refuses one side, which then runs as it is).
      Toys are tagged with what they isolate, too: "inplace", "views", "complex".

    `nondeterministic`, the field, is the reason for the last of these. `dynamic`: the sizes beside the batch that its
    samples change, as {input: {dim: symbol}}. `batch_dim`: where the batch is not dim 0 of an input, as {input: dim}.
    """

    name: str
    tags: frozenset[str]
    make: Callable[[], nn.Module] = field(repr=False)
    sample: Sampler = field(repr=False)
    nondeterministic: str | None = None
    dynamic: Mapping[str, Mapping[int, str]] | None = field(default=None, repr=False)
    batch_dim: Mapping[str, int | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.tags & COSTS) != 1:
            found = sorted(self.tags & COSTS)
            raise ValueError(f"{self.name}: exactly one of the tags {sorted(COSTS)} must be given, not {found}")
        if (NONDETERMINISTIC in self.tags) != (self.nondeterministic is not None):
            raise ValueError(f"{self.name}: the tag {NONDETERMINISTIC!r} and its reason go together")

    @property
    def family(self) -> str:
        """The library that defines the model: the part of the name before the slash."""
        return self.name.partition("/")[0]

    def has_graph(self, training: bool) -> bool:
        """Whether a plan holds forward in that mode; if not, the model's own Python is split."""
        return not self.tags & {"no-graph", "no-graph-in-training" if training else ""}

    def build(self, seed: int = 0) -> nn.Module:
        """A new model in training mode on the CPU, with random weights that are a function of the seed.

        Of torch's version and number of threads too, in the last bits of what BatchNorm keeps. Leaves the global RNG
        states of torch, Python and numpy as they were.
        """
        args, kwargs = self.inputs(batch=4, seed=seed)
        with undisturbed(), seeded(seed):
            model = self.make()
            randomise(model)
            settle_batch_norms(model, args, kwargs)
        return model.train()

    def inputs(self, batch: int, seed: int = 0) -> Inputs:
        """Positional and keyword arguments of a forward call over `batch` rows, a function of the two numbers."""
        if batch < 1:
            raise ValueError(f"{self.name}: a batch has at least one row, not {batch}")
        return self.sample(batch, torch.Generator().manual_seed(seed))

    def loss(self, output: Any) -> Tensor:
        """A scalar that depends on every floating tensor of the output; see `model_zoo.losses`."""
        return loss(output)
