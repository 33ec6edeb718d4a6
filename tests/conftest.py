"""Shapes in annotations are checked while the tests run; tolerances come from one place."""

from contextlib import contextmanager

from jaxtyping import install_import_hook

install_import_hook(["lastlayer", "benchmarks"], "beartype.beartype")

import jaxtyping  # noqa: E402
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
