"""What speeds and bits hang on at a device: the settings that all measuring processes share, and what became of its graphs."""

from __future__ import annotations

import sys
from typing import Any

import torch

FIXED = {  # as torch ships them
    "cudnn.allow_tf32": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cuda.matmul.allow_tf32": False,
}


class LostDeviceError(RuntimeError):
    """The device answers nothing more in this process: after an error that sticks, each later call would fail for it."""


def is_cuda(device: str) -> bool:
    """Whether a device is one of CUDA."""
    return torch.device(device).type == "cuda"


def fix(device: str) -> None:
    """Set what `FIXED` says, so that no process measures under other settings: cuDNN may round convolutions to TF32, matmul not."""
    if is_cuda(device):
        for name, value in FIXED.items():
            at, _, last = name.rpartition(".")
            owner: Any = torch.backends
            for step in at.split("."):
                owner = getattr(owner, step)
            setattr(owner, last, value)


def hold_alive(device: str, after: BaseException) -> None:
    """Raise `LostDeviceError` where the device is lost to this process after an error."""
    if is_cuda(device):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise LostDeviceError(f"the device is lost after {type(after).__name__}: {after}"[:300]) from error


def cuda_graphs(device: str) -> dict[str, int] | None:
    """How many CUDA graphs torch has recorded in this process, and how many it left out; None beside CUDA.

    inductor leaves them out without an error, for a mutated input or an op on the CPU.
    """
    if not is_cuda(device):
        return None
    trees, utils = (sys.modules.get(f"torch.{name}") for name in ("_inductor.cudagraph_trees", "_dynamo.utils"))
    manager = trees and trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    recorded = sum(map(len, manager.roots.values())) if manager else 0
    return {"recorded": recorded, "left_out": int(utils.counters["inductor"]["cudagraph_skips"]) if utils else 0}
