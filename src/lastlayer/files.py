"""Model files: safetensors with a JSON header, checked by a digest, written aside and moved into place. No pickle."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from lastlayer.errors import LastLayerError

FORMAT = 5
"""Raised whenever a file of today could not be read by the code of yesterday."""


class ModelFileError(LastLayerError, ValueError):
    """A model file that cannot be read, and why."""


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a JSON header to one file; until it is whole on disk, an older file stays what it was."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain = lambda value: value.item() if hasattr(value, "item") else str(value)  # a number of NumPy; a device, say
    text = json.dumps({"format": FORMAT, **header}, sort_keys=True, default=plain)
    metadata = {"lastlayer": text, "digest": _digest(tensors, text)}
    content = safetensors.torch.save(tensors, metadata)
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, moved to `path` once it is whole on disk; if anything fails, an older file stays."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # not tempfile: its files are closed to everyone else, whatever the umask
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write` wrote; anything else is refused with its reason."""
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"{path} is not a file: give the path of a model that was saved with model.save(path)")
    try:
        content = path.read_bytes()  # once: between two looks the file may have been replaced by a newer one
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(content).items()}  # aligned
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
        text = metadata["lastlayer"]
        header = json.loads(text)
        version = header["format"]
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is a safetensors file, but not one that lastlayer wrote") from error
    except Exception as error:  # the parsers below raise their own kinds of errors on damaged files
        raise ModelFileError(
            f"{path} is not a whole lastlayer model file (truncated, damaged or foreign): {error}; "
            "take an older copy or fit and save again"
        ) from error
    if not isinstance(version, int) or version > FORMAT:
        raise ModelFileError(
            f"{path} has file format {version}, and this version of lastlayer reads up to {FORMAT}: upgrade lastlayer"
        )
    if metadata.get("digest") != _digest(tensors, text):
        raise ModelFileError(f"{path} is damaged: its content does not match its digest; take an older copy")
    return tensors, header


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
