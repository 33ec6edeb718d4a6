"""Inputs of any structure: one tensor, several in order, or several by name, as networks are called with them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer._internal.arrays import converted
from lastlayer.errors import InputError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def as_inputs(given: Any) -> Inputs:
    """Convert what a loader or a user gives to tensors; integers, such as ids, stay integers."""
    if isinstance(given, Mapping):
        return {str(name): _tensor(values, f"the input {name!r}") for name, values in given.items()}
    if isinstance(given, (tuple, list)) and any(hasattr(part, "shape") for part in given):
        return tuple(_tensor(part, f"input {i}") for i, part in enumerate(given))
    return _tensor(given, "X")


def named(inputs: Inputs) -> dict[str, Tensor]:
    """Tensors by the names used in messages."""
    if isinstance(inputs, Tensor):
        return {"X": inputs}
    return inputs if isinstance(inputs, dict) else {f"X[{i}]": part for i, part in enumerate(inputs)}


def moved(inputs: Inputs, like: Tensor) -> Inputs:
    """Move inputs to the device of a tensor; floating-point inputs take its type, ids and masks keep their own."""
    there = lambda x: converted(x, like.dtype, like.device)
    if isinstance(inputs, Tensor):
        return there(inputs)
    if isinstance(inputs, dict):
        return {name: there(part) for name, part in inputs.items()}
    return tuple(there(part) for part in inputs)


def call(network: nn.Module, inputs: Inputs) -> Any:
    """Call a network: network(X), network(X1, X2, ...) or network(name=X, ...)."""
    try:
        if isinstance(inputs, Tensor):
            return network(inputs)
        return network(**inputs) if isinstance(inputs, dict) else network(*inputs)
    except RuntimeError as error:
        integers = [name for name, x in named(inputs).items() if not (x.is_floating_point() or x.dtype == torch.bool)]
        if not integers:
            raise
        raise InputError(
            f"the network failed on {', '.join(integers)}, given as integers ({error}): integers are passed on "
            "unchanged, for embeddings; convert those that are quantities, X.float()"
        ) from error


def output_tensor(output: Any) -> Tensor:
    """Output of a network as a tensor: itself, or `logits` or `last_hidden_state` of an object or dictionary."""
    if isinstance(output, Tensor):
        return output
    entries = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    for name in ("logits", "last_hidden_state"):
        if isinstance(entries.get(name), Tensor):
            found: Tensor = entries[name]
            return found
    raise InputError(
        f"the network returned a {type(output).__name__}, which has neither logits nor last_hidden_state: let it "
        "return a tensor of features, or name the layer that the last layer replaces, layer=..."
    )


def _tensor(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} is a {type(values).__name__}, not a tensor or an array: omit it") from error
