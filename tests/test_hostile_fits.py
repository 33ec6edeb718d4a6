"""Numbers that are hard on a model: every answer is finite, or an error of the library says what to do."""

import numpy as np
import pytest
import torch
from fuzz import fuzz, outcome
from fuzz_fits import BACKBONES, Answer, Generator
from helpers import refused, sine

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer._internal.arrays import as_array
from lastlayer.data.validation import LARGEST_TARGET
from lastlayer.errors import InputError
from lastlayer.networks.mlp import finite_features

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")
X, Y = sine(30, d=2)


def quick(**words) -> BLLRegressor:
    return BLLRegressor(**({"hidden": (4,), "max_epochs": 3, "preset": "evidence", "random_state": 0} | words))


@pytest.mark.parametrize("number", range(0, 40, 4))
def test_answers_are_finite_or_refused(number):
    _, _, wrong = fuzz("fits", 4, number)
    assert not wrong, wrong


def test_what_is_not_finite_and_what_is_no_error_of_ours_is_told(monkeypatch, tmp_path):
    generator = Generator(tmp_path)
    found = lambda case: outcome(generator.run, case)[0]
    case = next(case for case in map(generator.case, range(40)) if found(case) == "fine")
    with monkeypatch.context() as patch:
        patch.setattr(BLLRegressor, "fit", lambda *_, **__: torch.linalg.cholesky(torch.zeros(2, 2)))
        assert found(case) == "raw error"
    predict = BLLRegressor.predict
    monkeypatch.setattr(BLLRegressor, "predict", lambda *args, **words: np.multiply(np.nan, predict(*args, **words)))
    assert found(case) == "not finite"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"preset": "fast", "max_epochs": 2}, {"training": TrainingOptions("mse")}])
def test_a_fit_without_gradients_is_the_same_fit(context, options):
    wanted = quick(**options).fit(X, Y)
    with context():
        model = quick(**options).fit(X, Y)
        answer = model.predict(X)
    np.testing.assert_array_equal(answer, wanted.predict(X))
    x = torch.tensor(X, requires_grad=True)
    model.module()(x)["mean"].sum().backward()  # nothing of it belongs to inference mode
    assert torch.isfinite(x.grad).all()


def test_tensors_of_types_that_numpy_lacks_go_in():
    half = torch.tensor(X).bfloat16()
    assert as_array(half).dtype == np.float32
    wanted = quick().fit(half.double().numpy(), Y)
    np.testing.assert_allclose(quick().fit(half, Y).predict(half), wanted.predict(half.double().numpy()), rtol=1e-6)


REFUSED = {
    "huge inputs": (lambda: (1e301 * X, Y), r"X has values beyond 1e\+300 in 30 rows \(first: row 0\).*another unit"),
    "huge targets": (lambda: (X, 1e120 * Y), r"y has values beyond 1e\+100 in 30 rows"),
    "tiny targets": (lambda: (X, 1e-120 * Y), r"the targets differ by about .*e-121.*another unit"),
    "huge weights": (lambda: (X, Y, np.full(30, 1e300)), r"sample_weight is 1e\+300 in row 0.*divide"),
    "negative weights": (lambda: (X, Y, -np.ones(30)), "Negative"),
    "a row far out": (
        lambda: (_far(X), Y, np.where(np.arange(30) == 7, 1e-280, 1.0)),
        r"X has values farther than 1e.50 standard deviations .* in 1 rows \(first: row 7\)",
    ),
    "a target far out": (
        lambda: (X, _far(Y, 1e90), np.where(np.arange(30) == 7, 1e-280, 1.0)),
        r"y has values farther than 1e.50 standard deviations .* in 1 rows \(first: row 7\)",
    ),
    "complex numbers": (lambda: (X + 1j, Y), "Complex"),
    "complex objects": (lambda: ((X + 1j).astype(object), Y), "real number"),
}


def _far(X: np.ndarray, size: float = 1e200) -> np.ndarray:
    X = X.copy()
    X[7] = size
    return X


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_halves_are_refused_as_other_complex_numbers_are():
    refused("Complex", quick().fit, torch.tensor(X + 1j).to(torch.complex32), Y)


@pytest.mark.parametrize("name", REFUSED)
def test_what_float64_cannot_square_is_refused(name):
    rows, said = REFUSED[name]
    refused(said, quick().fit, *rows())


def test_known_noise_has_limits_too():
    refused(r"noise_std is 1e\+200", quick().fit, X, Y, noise_std=LARGEST_TARGET**2)


def test_questions_far_out_are_refused():
    for dtype, far in (("float64", 1e49), ("float32", 1e29)):
        model = quick(dtype=dtype).fit(X, Y)
        assert np.isfinite(model.predict(far + X, return_std=True)).all()
        for ask in (model.predict, model.predictive, model.joint, model.sample_y, model.extrapolation):
            refused(r"farther than 1e\+[35]0 standard deviations", ask, 1e3 * far + X)
        before = model.predict(X)
        refused("y has values farther", model.update, X, 1e60 + Y)
        np.testing.assert_array_equal(model.predict(X), before)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["log", "exp of exp", "reciprocal", "times 1e160", "NaN in one row"])
def test_features_that_are_not_finite_are_told(name, dtype):
    with pytest.raises(InputError, match=r"turned .* rows .*first: row .* into features that are NaN"):
        quick(backbone=lambda: Answer(2, BACKBONES[name]), dtype=dtype).fit(X, Y)


def test_a_network_without_an_answer_is_no_answer():
    """Inside the data it has one."""
    network = Answer(2, lambda h: torch.where(h.abs() > 50, torch.nan, torch.tanh(h)))
    model = quick(backbone=network).fit(X, Y)
    assert np.isfinite(model.predict(X)).all()
    for ask in (model.predict, model.predictive, model.joint, model.sample_y, model.extrapolation):
        refused("no finite prediction", ask, 1e6 + X)
    refused("NaN, infinite", finite_features, model.members_[0].network, torch.full((1, 2), 1e6, dtype=torch.float64))


def test_a_single_column_may_lie_backwards():
    """NumPy takes it for contiguous, with its negative stride; torch does not."""
    column = np.asfortranarray(X)[:, :1][:, ::-1]
    assert column.strides[1] < 0
    np.testing.assert_array_equal(quick().fit(column, Y).predict(column), quick().fit(X[:, :1], Y).predict(X[:, :1]))


@pytest.mark.parametrize("parameters", [{}, {"n_members": 2}, {"calibration": None}], ids=str)
def test_a_process_alone_has_one_member(parameters):
    assert len(quick(preset="fast", encoding="fourier").set_params(**parameters).fit(X, Y).members_) == 1


def test_no_epoch_of_mini_batches_is_a_training_too():
    assert np.isfinite(quick(batch_size=7, max_epochs=0).fit(X, Y).predict(X)).all()
