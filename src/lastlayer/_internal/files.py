"""Model files: safetensors with a JSON header and a digest, written to a temporary file and renamed. No pickle."""

import hashlib
import json
import os
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from lastlayer.errors import InputError, LastLayerError, check_writable

FORMAT = 8
"""Increased whenever older code could not read a new file."""


class ModelFileError(LastLayerError, ValueError):
    """A model file cannot be read; the message gives the reason."""


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a JSON header to one file; an older file stays until the new one is complete."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain = lambda value: value.item() if hasattr(value, "item") else str(value)  # a NumPy number; a device
    text = json.dumps({"format": FORMAT, **header}, sort_keys=True, default=plain)
    metadata = {"lastlayer": text, "digest": _digest(tensors, text)}
    content = safetensors.torch.save(tensors, metadata)
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context with a file to write to, which replaces `path` once it is complete; on failure an older file stays."""
    path = Path(os.path.realpath(path))
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # root could replace /dev/null
        raise InputError(f"{path} is neither a file nor a folder: give the name of a file")
    aside = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")
    try:
        # not tempfile, whose files only the owner may read, whatever the umask
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        handle = os.open(aside, flags, 0o666 if mode is None else stat.S_IMODE(mode))
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.chmod(aside, stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header of a file that `write` wrote; raises `ModelFileError` for any other file."""
    path = Path(path)
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is not a file: give the path of a model that was saved with model.save(path)")
        content = path.read_bytes()  # once: the file may be replaced between two reads
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(content).items()}  # aligned
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
        text = metadata["lastlayer"]
        header = json.loads(text)
        version = header["format"]
    except ModelFileError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is a safetensors file, but not one that lastlayer wrote") from error
    except Exception as error:  # the parsers below raise their own kinds of errors on damaged files
        raise ModelFileError(
            f"{path} is not a complete lastlayer model file (truncated, damaged or foreign): {error}; "
            "use an older copy, or fit and save again"
        ) from error
    if not isinstance(version, int) or isinstance(version, bool) or version > FORMAT:
        raise ModelFileError(
            f"{path} has file format {version}, and this version of lastlayer reads up to {FORMAT}: upgrade lastlayer"
        )
    if metadata.get("digest") != _digest(tensors, text):
        raise ModelFileError(f"{path} is damaged: its content does not match its digest; use an older copy")
    return tensors, header


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


# what an output may replace


@dataclass(frozen=True)
class OutputKind:
    """A kind of output file, and how to recognise an older file of that kind."""

    name: str
    recognizes: Callable[[Path], bool]


def check_output(
    path: Path, kind: OutputKind, *, inputs: Iterable[Path] = (), force: bool = False, advice: str = "another name"
) -> None:
    """Raise an error, before any work, if an output would destroy a user's file."""
    check_writable(path)
    if force or not path.exists():
        return
    for given in inputs:
        if given.exists() and path.samefile(given):
            raise InputError(
                f"{path} is an input of this command ({given}), which would be lost: give {advice} to write to, or "
                "--force to replace it"
            )
    if path.stat().st_size and not kind.recognizes(path):
        raise InputError(f"{path} exists and is not {kind.name}: give {advice} to write to, or --force to replace it")


def _begins(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _has(mark: bytes, within: int) -> Callable[[Path], bool]:
    return lambda path: mark in _begins(path, within)


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a file that `write` wrote, without checking its digest; {} for any other file."""
    length = int.from_bytes(_begins(path, 8), "little")
    if not 2 <= length <= path.stat().st_size - 8:
        return {}
    try:
        header = json.loads(json.loads(_begins(path, 8 + length)[8:])["__metadata__"]["lastlayer"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _is_predictions(path: Path) -> bool:
    """Whether the columns that `predict` adds are in the first line, or in the footer of a Parquet file."""
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            file.seek(-min(8, path.stat().st_size), os.SEEK_END)
            length = int.from_bytes(file.read(4), "little")
            file.seek(-min(8 + length, path.stat().st_size), os.SEEK_END)
            head = file.read()
        else:
            file.seek(0)
            head = file.readline(LONGEST_HEADER)
    return all(name.encode() in head for name in PREDICTED_COLUMNS)


def _is_bundle(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return {"about.npy", "model.tails.npy"} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


LONGEST_HEADER = 10_000_000
PREDICTED_COLUMNS = ("affine_cost", "extrapolation", "outside_range")
"""Columns of every table of predictions, whatever its targets are called."""
GENERATOR = '<meta name="generator" content="lastlayer">'
"""Tag at the start of every HTML page, by which it is recognised."""
SOFTWARE = "lastlayer"
"""Name of the software in the metadata of pictures."""
MODEL = OutputKind("a lastlayer model", lambda path: "model" in header_of(path))
PAGE = OutputKind("a page that lastlayer wrote", _has(GENERATOR.encode(), 1_000))
PREDICTIONS = OutputKind("a table of predictions", _is_predictions)
PICTURE = OutputKind("a picture that lastlayer wrote", _has(f"Software\0{SOFTWARE}".encode(), 1_000))
ONNX_GRAPH = OutputKind("an ONNX graph that lastlayer wrote", _has(b"\x12\x09lastlayer", 64))
C_SOURCE = OutputKind("C source that lastlayer wrote", _has(b"#define CASADI_BLAS_DGEMM ", 64))
BUNDLE = OutputKind("an exported model", _is_bundle)
BUNDLE_READER = OutputKind("the reader of an exported model", _has(b"exported lastlayer model", 200))
STUDY = OutputKind("the record of a study", _has(b'"studies"', 64))
