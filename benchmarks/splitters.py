"""Who can cut what in three parts and train it: Ariadne, torch's own pipeline front end, and FX's `split_module`.

`python -m benchmarks.splitters ask FILE [MODEL …]` asks each of them about models of the zoo, and appends a line of JSON for each
answer as it comes, leaving out what the file has; `python -m benchmarks.splitters table FILE` writes the answers as a table.

Asked are, for three micro-batches of three samples: are there three parts; is the output the whole model's; are all gradients,
bit for bit. Then the same with a smaller last micro-batch. Ariadne and torch's front end run under torch's own interleaved
schedule, all three stages in this process; what `split_module` gives has no stages, so it is called, and walked back, as a module.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, pipeline
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

import model_zoo
from ariadne import prepare_pipeline

PARTS, ROWS, MICRO, LIMIT = 3, 3, 3, 240
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any], torch.Tensor]
Step = Callable[[Inputs, list[Inputs]], list[Any]]  # trains on all samples, which are also given in micro-batches
QUESTIONS = ("parts", "output", "gradients", "smaller last")


class _Late(Exception):
    """An answer took too long."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises `_Late` in a block that takes longer."""

    def ring(*_: Any) -> None:
        raise _Late(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pieces(given: Inputs, rows: int, count: int) -> list[Inputs]:
    """Inputs in micro-batches: what has the batch is parted, all else goes to each."""
    leaves, spec = pytree.tree_flatten(given)
    columns = [
        t.tensor_split(count) if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == rows else (t,) * count
        for t in leaves
    ]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(count)]


def ariadne(model: nn.Module, micro: Inputs, loss: Loss) -> tuple[Step, Callable[[], Mapping[str, Any]]]:
    """Its parts, under torch's schedule."""
    made = prepare_pipeline(model, micro[0], parts=PARTS, example_kwargs=micro[1], dynamic_batch=(1, 8))

    def step(given: Inputs, parted: list[Inputs]) -> list[Any]:
        schedule = made.schedule("Interleaved1F1B", microbatches=MICRO, loss_fn=_noting(loss, outputs := []))
        schedule.step(*given[0], target=torch.zeros(MICRO), **given[1])
        return outputs

    return step, lambda: dict(model.named_parameters(remove_duplicate=False))


def front_end(model: nn.Module, micro: Inputs, loss: Loss) -> tuple[Step, Callable[[], Mapping[str, Any]]]:
    """`torch.distributed.pipelining.pipeline` with a policy that parts its calls evenly."""
    with torch.no_grad():
        spec = pytree.tree_structure(
            copy.deepcopy(model)(*micro[0], **micro[1])
        )  # its last stage gives leaves in a row

    def even(module: fx.GraphModule) -> fx.GraphModule:
        nodes = [n for n in module.graph.nodes if n.op.startswith("call_")]
        for k in range(1, PARTS):
            with module.graph.inserting_before(nodes[k * len(nodes) // PARTS]):
                module.graph.call_function(torch.ops.pippy._pipe_split.default)
        module.recompile()
        return module

    pipe = pipeline(model, *micro, split_policy=even)
    if pipe.num_stages != PARTS:
        raise ValueError(f"{pipe.num_stages} stages")
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(PARTS)]

    def structured(out: Any) -> Any:
        leaves = pytree.tree_leaves(out)
        return pytree.tree_unflatten(leaves, spec) if len(leaves) == spec.num_leaves else out

    def step(given: Inputs, parted: list[Inputs]) -> list[Any]:
        outputs: list[Any] = []
        noting = _noting(loss, outputs)
        schedule = ScheduleInterleaved1F1B([*stages], MICRO, loss_fn=lambda out, t: noting(structured(out), t))
        schedule.step(*given[0], target=torch.zeros(MICRO), **given[1])
        return outputs

    def held() -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for stage in stages:
            for name, p in stage.submod.named_parameters(remove_duplicate=False):
                if name not in found or (p.grad is not None and found[name].grad is None):
                    found[name] = p
        return found

    return step, held


def fx_parts(model: nn.Module, micro: Inputs, loss: Loss) -> tuple[Step, Callable[[], Mapping[str, Any]]]:
    """`torch.fx.symbolic_trace` and `split_module`."""
    traced = fx.symbolic_trace(model)
    calls = [n for n in traced.graph.nodes if n.op.startswith("call_")]
    if len(calls) < PARTS:
        raise ValueError(f"{len(calls)} calls")
    place = {n: i * PARTS // len(calls) for i, n in enumerate(calls)}
    parts = split_module(traced, model, lambda n: place.get(n, 0))

    def step(given: Inputs, parted: list[Inputs]) -> list[Any]:
        outputs: list[Any] = []
        for args, kwargs in parted:
            _noting(loss, outputs)(parts(*args, **kwargs), None).backward()
        for p in parts.parameters():
            if p.grad is not None:
                p.grad.div_(MICRO)
        return outputs

    return step, lambda: dict(model.named_parameters(remove_duplicate=False))  # the parts have the very same


SYSTEMS = {"ariadne": ariadne, "pipelining": front_end, "split_module": fx_parts}
TITLES = {"ariadne": "Ariadne", "pipelining": "torch `pipeline(…)`", "split_module": "FX `split_module`"}


def _noting(loss: Loss, outputs: list[Any]) -> Callable[[Any, Any], torch.Tensor]:
    def noting(out: Any, target: Any) -> torch.Tensor:
        outputs.append(pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, out))
        return loss(out)

    return noting


def same(a: Any, b: Any) -> bool:
    """Whether all tensors are, bit for bit; NaN is NaN."""
    one, other = ([t.detach() for t in pytree.tree_leaves(v) if isinstance(t, torch.Tensor)] for v in (a, b))
    return len(one) == len(other) and all(
        t.shape == u.shape and t.dtype == u.dtype and torch.equal(t.nan_to_num(7e3), u.nan_to_num(7e3))
        for t, u in zip(one, other, strict=True)
    )


def differing(whole: nn.Module, held: Mapping[str, Any]) -> list[str]:
    """The parameters whose gradient is not the whole model's."""
    wrong = []
    for name, p in whole.named_parameters():
        found = held.get(name)
        if found is None and p.grad is not None:
            wrong.append(f"{name} is missing")
        elif found is not None and (
            (p.grad is None) != (found.grad is None) or (p.grad is not None and not same(p.grad, found.grad))
        ):
            wrong.append(name)
    return wrong


def answer(name: str, system: str) -> dict[str, Any]:
    """What a system makes of a model."""
    entry = model_zoo.entry(name)
    found: dict[str, Any] = {"model": name, "system": system}
    try:
        model = entry.build()
        whole = copy.deepcopy(model)
        torch.manual_seed(0)
        step, held = SYSTEMS[system](model, entry.inputs(ROWS), entry.loss)
        found["parts"] = True
        for samples, asked in ((ROWS * MICRO, ("output", "gradients")), (ROWS * MICRO - 1, ("smaller last",) * 2)):
            given = entry.inputs(samples, seed=5)
            parted = pieces(given, samples, MICRO)
            whole.zero_grad()
            for p in held().values():
                p.grad = None
            torch.manual_seed(1)
            expected = []
            for args, kwargs in copy.deepcopy(parted):
                expected.append(whole(*args, **kwargs))
                entry.loss(expected[-1]).backward()
            for p in whole.parameters():
                if p.grad is not None:
                    p.grad.div_(MICRO)
            torch.manual_seed(1)
            outputs = step(given, parted)
            wrong = differing(whole, held())
            output = len(outputs) == MICRO and all(map(same, expected, outputs))
            found[asked[0]] = output
            found[asked[1]] = not wrong and (asked[0] != asked[1] or output)
            if wrong and "differs" not in found:
                found["differs"] = [len(wrong), *wrong[:3]]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return found


def ask(file: Path, models: Sequence[str]) -> None:
    """Ask about models that the file has nothing of, and write as answers come."""
    known = {(r["model"], r["system"]) for r in read(file)} if file.exists() else set()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in models:
        for system in SYSTEMS:
            if (name, system) in known:
                continue
            try:
                with limited(LIMIT):
                    found = answer(name, system)
            except _Late as late:
                found = {"model": name, "system": system, "error": str(late)}
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found | {"torch": torch.__version__}) + "\n")
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def read(file: Path) -> list[dict[str, Any]]:
    """The answers of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(answers: Sequence[Mapping[str, Any]]) -> str:
    """How many models each system serves, as Markdown: a row a system; then where its answer came and was another.

    A cell counts three answers: as the whole model, "differs" (another answer, without a word), "no" (an error, at this question or
    an earlier one).
    """
    models = {r["model"] for r in answers}
    lines = [
        f"| of {len(models)} models | in three parts | same output | same gradients | with a smaller last micro-batch |",
        "|---|---|---|---|---|",
    ]
    for system, title in TITLES.items():
        mine = [r for r in answers if r["system"] == system]
        cells = []
        for question in QUESTIONS:
            counts = Counter({True: "yes", False: "differs"}.get(r.get(question), "no") for r in mine)
            cells.append(", ".join(f"{counts[word]} {word}" for word in ("yes", "differs", "no") if counts[word]))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "| system | model | what differs |", "|---|---|---|"]
    for r in answers:
        others = [question for question in QUESTIONS if r.get(question) is False]
        if others:
            count, *names = r.get("differs", [0])
            which = f"; {count} gradients: {', '.join(names)}{', …' if count > len(names) else ''}" if count else ""
            lines.append(f"| {TITLES[r['system']]} | {r['model']} | {', '.join(others)}{which} |")
    return "\n".join(lines)


def chosen() -> list[str]:
    """Models that train and cost little: of each library evenly, and toys for what is hard in pipelines."""
    cheap = [n for n in model_zoo.names() if "cheap" in model_zoo.entry(n).tags and not n.startswith("toys/")]
    found = []
    for family, most in (("nn", 6), ("transformers", 12), ("timm", 14), ("torchvision", 8), ("ultralytics", 3)):
        mine = [n for n in cheap if n.startswith(f"{family}/")]
        found += mine[:: max(1, len(mine) // most)][:most]
    # Torch's schedules part inputs along their first dim, and here all micro-batches are alike beside the batch.
    otherwise = {"toys/height_and_width", "toys/time_first"}
    toys = [n for n in model_zoo.names() if n.startswith("toys/") and n not in otherwise]
    return found + toys[:: max(1, len(toys) // 24)][:24]


def main() -> int:
    """Ask, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("ask", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    if options.what == "table":
        print(table(read(options.file)))
    else:
        ask(options.file, options.models or chosen())
    return 0


if __name__ == "__main__":
    sys.exit(main())
