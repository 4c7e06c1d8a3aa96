"""`ariadne inspect`: what a half's file holds, read as `load` reads it; nothing of it is run."""

from __future__ import annotations

import os
from argparse import Namespace

from ariadne.cli.output import Answer, UsageError
from ariadne.half import Half, load
from ariadne.units import size


def run(options: Namespace) -> Answer:
    """Load, and describe."""
    if not os.path.isfile(options.file):
        raise UsageError(f"there is no file {options.file}")
    half = load(options.file, allow=options.allow, plain=True)
    return Answer(_text(half, options.file, options.brief), _data(half, options.file))


def _data(half: Half, path: str) -> dict[str, object]:
    runtime = half.runtime
    state = half.state_dict(keep_vars=True)
    return {
        "file": path,
        "bytes": os.path.getsize(path),
        "part": half.part,
        "made_by": half.made_by,
        "split_id": runtime.split_id,
        "signature": runtime.plan.signature,
        "digest": half.digest,
        "tensors": {n: [str(t.dtype).removeprefix("torch."), *t.shape] for n, t in state.items()},
        "plans": [
            {
                "batches": [list(r) for r in p.batches.ranges],
                "gradients": p.grad_enabled,
                "training": p.training,
                "inputs": {n: p.values[n].describe() for _, n in p.inputs},
                "crosses": {n: p.values[n].describe() for n in c[0].live},
                "ops": len(p.nodes),
            }
            for p, (c, _) in runtime._plans.items()
        ],
    }


def _text(half: Half, path: str, brief: bool) -> str:
    runtime = half.runtime
    tensors = [*half.parameters(), *half.buffers()]
    held = sum(t.numel() * t.itemsize for t in tensors)
    made = " and ".join(f"{who} {version}" for who, version in half.made_by.items())
    lines = [
        f"{path}: {half!r}",
        f"file      {size(os.path.getsize(path))}, {len(tensors)} tensors of {size(held)}; saved by {made}",
        f"cut       {runtime.split_id} of plan {runtime.plan.signature}; weights {half.digest or 'of no known model'}",
    ]
    for plan, (candidates, _) in runtime._plans.items():
        mode = "training" if plan.training else "eval"
        lines.append(f"plan      {plan.for_batches}, in {mode} mode, {len(plan.nodes)} ops")
        if plan.inputs:
            lines.append("  takes   " + ", ".join(f"{n}: {plan.values[n].describe()}" for _, n in plan.inputs))
        lines.append("  crosses " + ", ".join(f"{n}: {plan.values[n].describe()}" for n in candidates[0].live))
        if not brief:
            lines += [f"    {plan.show(node)}" for node in plan.nodes]
    return "\n".join(lines)
