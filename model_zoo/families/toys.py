"""The family `toys`: each isolates one hard thing, which its docstring says."""

from model_zoo.families import (
    toys_applied,
    toys_batch,
    toys_classes,
    toys_containers,
    toys_dtypes,
    toys_errors,
    toys_groups,
    toys_kept,
    toys_lengths,
    toys_opaque,
    toys_opened,
    toys_past,
    toys_scripted,
    toys_settled,
    toys_sizes,
    toys_state,
    toys_training,
    toys_values,
    toys_weights,
    toys_writes,
)

_MODULES = (
    toys_applied,
    toys_batch,
    toys_classes,
    toys_containers,
    toys_dtypes,
    toys_errors,
    toys_groups,
    toys_kept,
    toys_lengths,
    toys_opaque,
    toys_opened,
    toys_past,
    toys_scripted,
    toys_settled,
    toys_sizes,
    toys_state,
    toys_training,
    toys_values,
    toys_weights,
    toys_writes,
)

ENTRIES = tuple(made for module in _MODULES for made in module.ENTRIES)
