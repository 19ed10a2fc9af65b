"""The parameters of a model that an engine sharded."""

from __future__ import annotations

from torch import nn

_MARKS = {"_fsdp_flattened", "ds_id"}  # of FSDP1 and of ZeRO-3


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, by their names, of which a process may hold a part only."""
    found = {}
    for fqn, parameter in model.named_parameters():
        is_d_tensor = type(parameter).__name__ == "DTensor"
        if is_d_tensor or not _MARKS.isdisjoint(vars(parameter)):
            found[fqn] = parameter

    return found
