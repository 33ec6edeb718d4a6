"""Checkpoints: the whole state of mini-batch training in one file, written to a temporary file and moved into place."""

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastlayer._internal import files
from lastlayer.errors import InputError
from lastlayer.training.engine import Engine, TrainingHistory

EVERY_SECONDS = 60.0
"""Seconds between two checkpoints."""
OWN_NAME = re.compile(r"training(-\d+-\d+)?\.safetensors")
STATE_KEYS = {"training", "epoch", "history"}
"""Pattern of the names of checkpoint files, and keys that their headers contain."""
NUMBERS = ("epoch", "step", "n_steps", "rate", "falls", "ends", "level", "lowest", "lowest_epoch")
"""Numbers of the engine's state."""


@dataclass
class Checkpoint:
    """File of a checkpoint, and the training that it belongs to."""

    path: Path
    training: dict[str, Any]
    """Settings and data that the checkpoint belongs to; a file of another training is refused."""
    draws: bool = False
    """Whether training draws from torch's global generators, as user-defined networks may."""
    _last: float = field(default_factory=time.monotonic)

    def keep(self, engine: Engine, *, at_once: bool = False) -> None:
        """Write the state if enough time has passed; the first process writes for all."""
        if engine.problem.process_group.rank or not (at_once or time.monotonic() - self._last >= EVERY_SECONDS):
            return
        tensors, numbers = _state(engine)
        if self.draws:
            tensors |= _random_states(engine.loss.device)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors allows no shared memory
        files.write(self.path, tensors, {"training": self.training, **numbers})
        self._last = time.monotonic()

    def restore(self, engine: Engine) -> None:
        """Resume from the file, if there is one; all processes resume from the same state."""
        tensors, header = files.read(self.path) if self.path.exists() else ({}, {})
        place = [header["epoch"], header["step"]] if "epoch" in header and "step" in header else None
        engine.problem.process_group.agree({f"epoch and step of the state in {self.path}": place})
        if not header:
            return
        theirs, mine = header.get("training"), json.loads(json.dumps(self.training))
        if not isinstance(theirs, dict) or theirs != mine:
            other = theirs if isinstance(theirs, dict) else {}
            names = sorted(name for name in {*mine, *other} if mine.get(name) != other.get(name))
            told = "; ".join(f"{name}: {other.get(name)} there, {mine.get(name)} here" for name in names[:4])
            raise InputError(
                f"the checkpoint {self.path} belongs to another training ({told}): give another path, delete the file, "
                "or fit with the same data and parameters as before"
            )
        _resume(engine, tensors, header)


def clear_checkpoints(folder: Path) -> None:
    """Delete the checkpoints that the library wrote; other files in the folder stay."""
    for path in folder.iterdir():
        if OWN_NAME.fullmatch(path.name) and path.is_file() and STATE_KEYS <= files.header_of(path).keys():
            path.unlink()


def _state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    engine.flush()
    tensors = {f"network.{name}": value for name, value in engine.problem.module.state_dict().items()}
    for i, p in enumerate(engine.parameters):
        tensors[f"good.{i}"], tensors[f"best.{i}"] = engine.good[i], engine.best[i]
        tensors |= {f"adam.{i}.{name}": value for name, value in engine.steps.state[p].items()}
    tensors |= {f"memory.{name}": value for name, value in engine.problem.memory().items()}
    tensors |= {name: getattr(engine, name) for name in ("loss", "pace", "best_score", "best_epoch")}
    return tensors, {name: getattr(engine, name) for name in NUMBERS} | {"history": asdict(engine.history)}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random": torch.get_rng_state()}
    return states | ({"random.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _resume(engine: Engine, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    device = engine.loss.device
    moved = {name: value.to(device) for name, value in tensors.items() if not name.startswith("random")}

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): v for name, v in moved.items() if name.startswith(prefix)}

    engine.problem.module.load_state_dict(under("network."))
    engine.good = [moved[f"good.{i}"] for i in range(len(engine.parameters))]
    engine.best = [moved[f"best.{i}"] for i in range(len(engine.parameters))]
    for i, p in enumerate(engine.parameters):
        engine.steps.state[p] = under(f"adam.{i}.")
    engine.problem.remember(under("memory."))
    engine.loss, engine.pace = moved["loss"], moved["pace"]
    engine.best_score, engine.best_epoch = moved["best_score"].cpu(), moved["best_epoch"].cpu()
    for name in NUMBERS:
        setattr(engine, name, header[name])
    engine.history = TrainingHistory(**header["history"])
    if "random" in tensors:
        torch.set_rng_state(tensors["random"])
    if "random.cuda" in tensors and engine.loss.is_cuda:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
