"""skops does not know torch: what docs/exchange.md says of it, and the way around that it shows."""

import numpy as np
import pytest
from models import data, fitted
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer

import lastlayer

io = pytest.importorskip("skops.io")


def test_a_fitted_model_goes_into_a_skops_file_as_the_bytes_of_its_own(tmp_path):
    """With the steps before it, and without a type that has to be trusted; the model itself skops refuses."""
    (X, _), model = data(), fitted("single")
    steps = make_pipeline(PowerTransformer(), "passthrough").fit(X)
    with pytest.raises(RuntimeError, match="Tensor"):
        io.dumps(model)
    model.save(tmp_path / "model.lastlayer")
    io.dump({"steps": steps, "model": (tmp_path / "model.lastlayer").read_bytes()}, tmp_path / "all.skops")

    assert io.get_untrusted_types(file=tmp_path / "all.skops") == []
    read = io.load(tmp_path / "all.skops")
    (tmp_path / "again.lastlayer").write_bytes(read["model"])
    again = lastlayer.load(tmp_path / "again.lastlayer")
    np.testing.assert_array_equal(read["steps"].transform(X), steps.transform(X))
    np.testing.assert_array_equal(again.predictive(X).std, model.predictive(X).std)


def test_parameters_of_a_model_that_is_not_fitted_pass_as_they_are():
    model = lastlayer.BLLRegressor(hidden=(7,), preset="evidence")
    written = io.dumps(model)
    again = io.loads(written, trusted=io.get_untrusted_types(data=written))
    assert again.get_params() == model.get_params()
