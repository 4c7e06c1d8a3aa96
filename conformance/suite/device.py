"""Where the models of a run live: the device that `--device` names, which the processes of a run are told by a variable.

On CUDA torch's deterministic algorithms are on (ops that have none warn): a sum of atomics has other bits in each run. A model
whose own runs differ all the same is found nondeterministic, as anywhere.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "CONFORMANCE_DEVICE"
DEVICES = ("cpu", "cuda")


def chosen() -> str:
    """The device of this run: "cpu" unless `use` said otherwise, here or in the process that began this one."""
    return os.environ.get(VARIABLE, "cpu")


def use(device: str) -> None:
    """Choose the device for this process and those that it begins; ValueError where torch finds none such."""
    if device == "cuda":
        import torch  # noqa: PLC0415 - no other command needs it in this process

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device; leave the option out to run on the CPU")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic matrix products
        # A server that forks asks whether there is CUDA, as libraries do when they are imported; this way it does not wake it up.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ[VARIABLE] = device


def settle() -> None:
    """Set what a process that runs cases on the chosen device needs."""
    if chosen() == "cuda":
        import torch  # noqa: PLC0415

        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = False


def facts() -> dict[str, str]:
    """What results depend on, beside what an environment holds anyway; nothing on the CPU."""
    if chosen() == "cpu":
        return {}
    import torch  # noqa: PLC0415

    return {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def moved(value: Any) -> Any:
    """The nested value with its tensors, or the module, on the chosen device."""
    if chosen() == "cpu":
        return value
    import torch  # noqa: PLC0415

    if isinstance(value, torch.nn.Module):
        return value.to(chosen())
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(chosen()), value)
