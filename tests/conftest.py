"""Shapes in annotations are checked while the tests run; tolerances come from one place."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import jaxtyping

jaxtyped = jaxtyping.jaxtyped


def jaxtyped_when_called(defined: Any = None, *, typechecker: Callable) -> Any:
    """Checks are made at the first call that is checked: many a function is defined anew in every step of training."""
    if defined is None:
        return partial(jaxtyped_when_called, typechecker=typechecker)
    if not isinstance(defined, FunctionType):
        return jaxtyped(defined, typechecker=typechecker)
    checked = None

    @wraps(defined)
    def call(*args, **words):
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:
            return defined(*args, **words)
        if checked is None:
            checked = jaxtyped(defined, typechecker=typechecker)
        return checked(*args, **words)

    return call


jaxtyping.jaxtyped = jaxtyped_when_called  # the hook writes this name into what it imports
jaxtyping.install_import_hook(["lastlayer", "benchmarks"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

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
    with _shapes_checked(name not in seen):
        yield
    seen.add(name)


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
