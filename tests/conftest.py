"""Shapes in annotations are checked while the tests run; tolerances come from one place."""

from jaxtyping import install_import_hook

install_import_hook("lastlayer", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
