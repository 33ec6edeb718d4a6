"""Shapes in annotations are checked while the tests run; tolerances come from one place."""

import inspect
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import settings

jaxtyped = jaxtyping.jaxtyped
checked_calls: set[Hashable] = set()
"""Of the test that runs: functions, and what their arguments looked like."""


def jaxtyped_when_called(defined: Any = None, *, typechecker: Callable) -> Any:
    """Check a function once a test for arguments that look alike. Checks are not made before they are needed: many a
    function is defined anew in every step of training, and most are never called while checks are on."""
    if defined is None:
        return partial(jaxtyped_when_called, typechecker=typechecker)
    if isinstance(defined, type):
        if is_dataclass(defined) and "__init__" in vars(defined):
            defined.__init__ = jaxtyped_when_called(defined.__init__, typechecker=typechecker)
        return defined
    checked = None

    @wraps(defined)
    def call(*args, **words):
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:
            return defined(*args, **words)
        this = defined.__code__, looks(args), *words, looks(tuple(words.values()))
        if this in checked_calls:
            return defined(*args, **words)
        checked = checked or jaxtyped(defined, typechecker=typechecker)
        result = checked(*args, **words)
        checked_calls.add(this)
        return result

    call.__signature__ = inspect.signature(defined)  # some clients look at it and do not follow `__wrapped__`
    return call


def looks(value: Any, depth: int = 2) -> Hashable:
    """Type, shape and dtype, those of its parts too; words as they are."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), tuple(value.shape), value.dtype
    if value is None or isinstance(value, str | bool):
        return value
    if depth and isinstance(value, tuple | list):
        return type(value), *[looks(part, depth - 1) for part in value]
    if depth and is_dataclass(type(value)):
        return type(value), *[looks(part, depth - 1) for part in getattr(value, "__dict__", {}).values()]
    return type(value)


jaxtyping.jaxtyped = jaxtyped_when_called  # the hook writes this name into what it imports
jaxtyping.install_import_hook(["lastlayer", "benchmarks"], "beartype.beartype")

torch.set_num_threads(1)  # small problems: a second thread only waits
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")
seen: set[str] = set()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def shapes_checked(request):
    """In the first case of a parametrised test; the checks take longer than the library, and the shapes repeat."""
    name = getattr(request.node, "originalname", request.node.name)
    checked_calls.clear()
    with _shapes_checked(name not in seen):
        yield
    seen.add(name)


@pytest.fixture(scope="module")
def small_process():
    """Mixtures whose process has fewer frequencies: its algebra takes half the time of a small fit."""
    from helpers import small_process

    with small_process():
        yield


@pytest.fixture
def as_a_user(shapes_checked):
    """Without the run-time checks of shapes, which a user does not have: the library's own errors must speak."""
    with _shapes_checked(False):
        yield


@contextmanager
def _shapes_checked(checked: bool):
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", not checked)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def at_terminal(monkeypatch, capsys):
    """Progress bars are drawn as at a terminal; elsewhere they are a line per minute."""
    from lastlayer._internal import work  # not before the import hook above

    monkeypatch.setattr(work, "at_terminal", lambda: True)
