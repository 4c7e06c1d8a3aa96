"""What of torch's modes decides how code is compiled, and which kernels run."""

from __future__ import annotations

from typing import Any

import torch


def modes() -> tuple[Any, ...]:
    """Autocast, the default dtype, determinism, precision, and which libraries may be asked, as they are now."""
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return autocast, torch.get_default_dtype(), torch._C._get_deterministic_algorithms(), _precision()


def _precision() -> tuple[str, ...]:
    """How precisely float32 is multiplied, as torch's `fp32_precision` says it of each backend."""
    ask = torch._C._get_fp32_precision_getter
    return ask("cuda", "matmul"), ask("cuda", "conv"), ask("mkldnn", "matmul"), ask("mkldnn", "conv")


def libraries() -> tuple[Any, ...]:
    """Which of CUDA's libraries and ways torch may choose, as settings say it: a graph holds what was chosen."""
    c = torch._C
    return (
        c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic(), c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(), c._get_math_sdp_enabled(), c._get_cudnn_sdp_enabled(),
        c._get_cublas_allow_fp16_reduced_precision_reduction(), c._get_cublas_allow_bf16_reduced_precision_reduction(),
    )  # fmt: skip
