"""Stops and starts: the whole state of a mini-batch training in one file, written aside and moved into place."""

import json
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lastlayer import files
from lastlayer.errors import InputError
from lastlayer.training.running import moment_of, moment_tensors

if TYPE_CHECKING:
    from lastlayer.training.batches import Loop

EVERY_SECONDS = 60.0
"""Between two states on disk."""


@dataclass
class Checkpoint:
    """Where to keep the state, and of which training it is."""

    path: Path
    training: dict[str, Any]
    """What the state belongs to: configuration and data. A file of another training is refused."""
    _last: float = field(default_factory=time.monotonic)

    def keep(self, loop: "Loop", *, at_once: bool = False) -> None:
        """Write the state if it is time; the first process writes for all."""
        if loop.layer.ranks.rank or not (at_once or time.monotonic() - self._last >= EVERY_SECONDS):
            return
        tensors, numbers = _state(loop)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors takes no shared memory
        files.write(self.path, tensors, {"training": self.training, **numbers})
        self._last = time.monotonic()

    def restore(self, loop: "Loop") -> None:
        """Go on from the file, if there is one."""
        if not self.path.exists():
            return
        tensors, header = files.read(self.path)
        theirs, mine = header.get("training"), json.loads(json.dumps(self.training))
        if not isinstance(theirs, dict) or theirs != mine:
            other = theirs if isinstance(theirs, dict) else {}
            words = sorted(word for word in {*mine, *other} if mine.get(word) != other.get(word))
            told = "; ".join(f"{word}: {other.get(word)} there, {mine.get(word)} here" for word in words[:4])
            raise InputError(
                f"the checkpoint {self.path} belongs to another training ({told}): give another path, delete the file, "
                "or fit with the same data and words as before"
            )
        _resume(loop, tensors, header)


def _state(loop: "Loop") -> tuple[dict[str, Tensor], dict[str, Any]]:
    layer = loop.layer
    tensors = {f"network.{name}": value for name, value in loop.network.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in (loop.best or {}).items()}
    for i, p in enumerate(loop.parameters):
        tensors[f"good.{i}"] = loop.good[i]
        tensors |= {f"adam.{i}.{name}": value for name, value in loop.adam.state[p].items()}
    if layer.moment is not None:
        tensors |= moment_tensors(layer.moment)
    tensors["sum_nlml"] = loop.sum_nlml
    if loop.pace is not None:
        tensors["pace"] = loop.pace
    tensors["random"] = torch.get_rng_state()
    if layer.count.is_cuda:
        tensors["random.cuda"] = torch.cuda.get_rng_state(layer.count.device)
    numbers = {
        "epoch": loop.epoch,
        "batch": loop.batch,
        "n_batches": loop.n_batches,
        "steps": layer.steps,
        "best_score": str(loop.best_score),
        "record": {f.name: getattr(loop.record, f.name) for f in fields(loop.record)},
    }
    return tensors, numbers


def _resume(loop: "Loop", tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    layer, device = loop.layer, loop.layer.count.device
    moved = {name: value.to(device) for name, value in tensors.items() if not name.startswith("random")}

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): v for name, v in moved.items() if name.startswith(prefix)}

    loop.network.load_state_dict(under("network."))
    loop.best = under("best.") or None
    for i, p in enumerate(loop.parameters):
        loop.good[i] = moved[f"good.{i}"]
        state = under(f"adam.{i}.")
        loop.adam.state[p] = {name: v.cpu() if name == "step" else v for name, v in state.items()}
    if "log_alpha" in moved:
        layer.moment = moment_of(moved, layer.bias_prior)
    layer.steps, loop.sum_nlml, loop.pace = header["steps"], moved["sum_nlml"], moved.get("pace")
    loop.epoch, loop.batch, loop.n_batches = header["epoch"], header["batch"], header["n_batches"]
    loop.best_score = float(header["best_score"])
    loop.record = replace(loop.record, **header["record"])
    torch.set_rng_state(tensors["random"])
    if "random.cuda" in tensors and layer.count.is_cuda:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
