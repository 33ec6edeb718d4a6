"""Shapes in annotations are checked while the tests run; tolerances come from one place."""

from jaxtyping import install_import_hook

install_import_hook(["lastlayer", "benchmarks"], "beartype.beartype")

import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)  # small problems: a second thread only waits
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def as_a_user():
    """Without the run-time checks of shapes, which a user does not have: the library's own errors must speak."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
