"""Parameters: checked alike by every way to fit, and what "auto" became is told, saved and loaded."""

import copy
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from inspect import getmodule

import numpy as np
import pytest
import torch
from helpers import refused, reloaded, sine
from sklearn.model_selection import GroupKFold, KFold, TimeSeriesSplit
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points, Rows
from lastlayer.ensemble.splits import folds_for
from lastlayer.networks.mlp import parts_of
from lastlayer.settings.resolve import FAST_PRECISIONS, N_FOLDS, PRIOR_PRECISIONS, resolve
from lastlayer.settings.types import (
    ADDITIVE,
    FOURIER,
    LINEAR,
    NETWORK,
    NO_NOISE_PRIOR,
    STRUCTURES,
    WEAK_NOISE_PRIOR,
    EnsembleSettings,
    Family,
    Network,
    Plan,
    Settings,
    Shape,
)

pytestmark = pytest.mark.usefixtures("small_process")

TINY = {"hidden": (4,), "max_epochs": 2, "random_state": 0}


def source(m: int = 60) -> Points:
    X, y = sine(m)
    return Points(torch.tensor(X), Readings(torch.tensor(y)[:, None]))


def fit(options: dict) -> BLLRegressor:
    return BLLRegressor(**(TINY | options)).fit(*sine())


def fit_source(options: dict) -> BLLRegressor:
    return BLLRegressor(**(TINY | options)).fit_source(source())


def training(**options) -> dict:
    return {"training": TrainingOptions(**options)}


@pytest.mark.parametrize("entrance", [fit, fit_source])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": "diagnal"}, "noise='diagnal'.*did you mean 'diagonal'"),
        (training(bias_prior="flatt"), "bias_prior='flatt'.*did you mean 'flat'"),
        ({"dtype": "float46"}, "dtype='float46'.*did you mean 'float64'"),
        ({"preset": "fats"}, "preset='fats'.*did you mean 'fast'"),
        ({"activation": "tahn"}, "activation='tahn'.*did you mean 'tanh'"),
        ({"calibration": "atuo"}, "calibration='atuo'.*did you mean 'auto'"),
        ({"input_skip": "atuo"}, "input_skip='atuo'.*did you mean 'auto'"),
        ({"hidden": "atuo"}, "hidden='atuo'.*did you mean 'auto'"),
        ({"encoding": "peicewise"}, "encoding='peicewise'.*did you mean 'piecewise'"),
        ({"encoding": "piecewise", "input_skip": False}, 'encoding="piecewise" cannot.*with input_skip=False'),
        ({"encoding": "piecewise", "backbone": nn.Linear(1, 3)}, r'encoding="piecewise" cannot.*with backbone=\.\.\.'),
        ({"n_members": 0}, "n_members=0"),
        ({"n_members": 1.5}, r"n_members=1\.5"),
        ({"n_members": True}, "n_members=True"),
        ({"n_members": "many"}, "n_members='many'"),
        ({"n_members": 2, "backbone": nn.Linear(1, 3)}, "n_members=2 needs networks with different initial weights"),
        ({"hidden_prior": -1.0}, r"hidden_prior=-1\.0"),
        ({"hidden_prior": math.nan}, "hidden_prior=nan"),
        ({"hidden_prior": math.inf}, "hidden_prior=inf"),
        ({"hidden_prior": "strong"}, "hidden_prior='strong'"),
        ({"hidden": (0,)}, "hidden"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"max_epochs": 2.5}, r"max_epochs=2\.5"),
        ({"batch_size": 1}, "batch_size=1"),
        ({"batch_size": 2.5}, r"batch_size=2\.5"),
        ({"batch_size": "many"}, "batch_size='many'"),
        ({"training": {"objective": "mse"}}, "training=.*TrainingOptions"),
        (training(objective="profild"), "objective='profild'.*did you mean 'profiled'"),
        (training(early_stopping="atuo"), "early_stopping='atuo'.*did you mean 'auto'"),
        (training(chunk_size=1), "chunk_size=1"),
        (training(learning_rate=0.0), "learning_rate=0"),
        (training(learning_rate=-1e-3), "learning_rate=-0.001"),
        (training(learning_rate=math.nan), "learning_rate=nan"),
        (training(learning_rate="fast"), "learning_rate='fast'"),
        (training(validation_fraction=0.0), "validation_fraction=0"),
        (training(validation_fraction=1.5), r"validation_fraction=1\.5"),
        *((training(validation_fraction=v), f"validation_fraction={v}") for v in (1.0, -0.1, math.nan)),
        ({"hidden": (5, -1)}, "hidden"),
        (training(objective="mse", chunk_size=10), 'chunk_size needs objective="profiled"'),
        ({"batch_size": 10} | training(objective="mse"), 'batch_size=10 needs objective="profiled"'),
        ({"batch_size": 10} | training(chunk_size=10), "no chunk_size"),
    ],
    ids=str,
)
def test_every_way_to_fit_checks_every_parameter(as_a_user, entrance, options, said):
    refused(f"(?s){said}", entrance, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": "input"}, 'noise="input".*validation_data'),
        (training(early_stopping=True), "early_stopping=True"),
        ({"calibration": KFold(3)}, "calibration=KFold.*validation_data"),
        ({"calibration": "alpha"}, "calibration='alpha'.*validation_data"),
        ({"batch_size": None}, "batch_size=None"),
        ({"n_members": 2}, "n_members=2"),
        ({"encoding": "piecewise"}, "encoding='piecewise' needs a table"),
        (training(objective="mse"), "objective='mse'"),
        (training(chunk_size=10), "chunk_size=10"),
    ],
    ids=str,
)
def test_a_source_refuses_what_needs_all_rows_or_some_of_them_held_out(as_a_user, options, said):
    refused(f"(?s){said}", fit_source, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"calibration": 5}, "calibration=5 is not a splitter"),
        ({"calibration": GroupKFold(3)}, "could not split 60 rows.*groups"),
        ({"calibration": TimeSeriesSplit(100)}, "could not split 60 rows"),
        ({"noise": "input", "calibration": None}, 'noise="input" is fitted to held-out rows'),
        ({"noise": "input", "preset": "evidence"}, 'noise="input" is fitted to held-out rows'),
        (training(checkpoint="somewhere"), "batch_size"),
        ({"encoding": "fourier", "backbone": nn.Linear(1, 3)}, "cannot be combined with backbone"),
    ],
    ids=str,
)
def test_what_needs_rows_held_out_or_batches_is_told(as_a_user, options, said):
    refused(f"(?s){said}", fit, options)


def fit_with_validation(model: BLLRegressor) -> BLLRegressor:
    return model.fit_source(source(), validation_data=sine(20, seed=3))


def test_with_validation_data_a_source_takes_noise_of_the_input_and_algorithm_1_but_no_splitter(as_a_user):
    model = BLLRegressor(**TINY, calibration=KFold(3))
    for entrance in (lambda: model.fit(*sine(), validation_data=sine(20)), lambda: fit_with_validation(model)):
        refused(r"(?s)calibration=KFold.*validation_data", entrance)
    noisy = fit_with_validation(BLLRegressor(**TINY, noise="input"))
    assert noisy.calibration_.head is not None
    tuned = fit_with_validation(BLLRegressor(**TINY, calibration="alpha"))
    assert tuned.calibration_ is None
    assert math.isfinite(tuned.alpha_curve_.lpd)


def test_a_model_that_was_refused_holds_nothing(as_a_user):
    model = fit({"preset": "evidence"}).set_params(batch_size=None)
    refused("batch_size=None", model.fit_source, source())
    with pytest.raises(ValueError, match="not fitted"):
        model.settings_  # noqa: B018
    again = copy.deepcopy(default()).set_params(training=TrainingOptions(objective="profild"))
    X, y = sine()
    refused("objective", again.fit, 100 * X, 100 * y)
    refused("not fitted", again.predict, X, error=ValueError)  # never the old last layer behind new scales


@cache
def default() -> BLLRegressor:
    return fit({})


KINDS = {
    "default": lambda: default(),
    "fast": lambda: fit({"preset": "fast"}),
    "evidence": lambda: fit({"preset": "evidence"}),
    "few rows": lambda: BLLRegressor(**TINY).fit(*sine(12)),
    "given members": lambda: fit({"n_members": 2}),
    "encoded": lambda: fit({"n_members": 2, "hidden_prior": 0.3, "encoding": "piecewise"}),
    "encoded, one network": lambda: fit({"preset": "evidence", "encoding": "piecewise"}),
    "alpha": lambda: fit({"calibration": "alpha", "hidden_prior": 0.3}),
    "splitter": lambda: fit({"calibration": KFold(3), "n_members": 2, "hidden_prior": 0.3}),
    "mini-batches": lambda: fit({"preset": "evidence", "batch_size": 20}),
    "backbone": lambda: fit({"backbone": nn.Sequential(nn.Linear(1, 3), nn.Tanh())}),
    "source": lambda: fit_source({}),
    "source, validation data": lambda: fit_with_validation(BLLRegressor(**TINY)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_settings_tell_what_every_auto_became_and_are_saved_with_the_model(kind, tmp_path):
    model = KINDS[kind]()
    assert isinstance(model.settings_, Settings)
    assert "auto" not in str(model.settings_)
    assert model.settings_.network.hidden == (4,)
    assert model.settings_.training.max_epochs == 2
    again = reloaded(model, tmp_path, backbone=model.backbone)
    assert again.settings_ == model.settings_
    assert again.calibration == ("auto" if kind == "splitter" else model.calibration)  # a splitter is no part of a file
    X, _ = sine(7, seed=1)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_settings_say_what_was_done():
    model = fit({"preset": "fast", "noise": "full", "dtype": "float32"})
    s = model.settings_
    assert (s.layer.noise, STRUCTURES[s.layer.noise], s.place.dtype) == ("full", "full", "float32")
    trained = [member.network for member in model.members_ if member.family.trained]
    assert {p.dtype for network in trained for p in network.parameters()} == {torch.float32}
    # the process is one member, of every row
    wanted = dict.fromkeys(s.ensemble.families, s.ensemble.n_members) | {FOURIER: 1}
    assert Counter(member.family for member in model.members_) == wanted
    assert len(model.history_["nlml"]) == s.training.max_epochs
    assert model.history_["learning_rate"][0] == s.training.learning_rate


def test_the_parameters_of_a_model_stay_as_they_were_given():
    """`settings_` is where an "auto" is resolved: the estimator can be fitted to other data."""
    model = copy.deepcopy(default())
    assert (model.n_members, model.calibration, model.hidden_prior, model.batch_size) == ("auto",) * 4
    assert (model.encoding, model.input_skip) == ("auto",) * 2
    assert model.training is None
    many, few = model.settings_, model.fit(*sine(4)).settings_
    assert (many.plan, few.plan) == (Plan("folds", "curve"), Plan())
    assert (model.hidden, model.noise) == ((4,), "auto")


def test_noise_left_to_us_is_found_to_depend_on_the_input_or_not():
    rng = np.random.default_rng(0)
    X, noise = rng.uniform(-3, 3, (300, 1)), rng.standard_normal(300)
    even, uneven = (
        BLLRegressor(**TINY, n_members=1, hidden_prior=0.3).fit(X, X[:, 0] + scale * noise)
        for scale in (0.3, 0.2 * np.exp(0.7 * X[:, 0]))
    )
    assert (even.settings_.layer.noise, even.calibration_.head) == ("diagonal", None)
    assert uneven.settings_.layer.noise == "input"
    assert uneven.calibration_.head is not None


PLAIN, ENCODED_PLAIN = (NETWORK,), (Network(encoding="piecewise"),)
NETWORKS = tuple(Network(precision) for precision in PRIOR_PRECISIONS)
ENCODED = tuple(Network(precision, "piecewise") for precision in PRIOR_PRECISIONS)
FAST = tuple(Network(precision) for precision in FAST_PRECISIONS)
FAST_ENCODED = tuple(Network(precision, "piecewise") for precision in FAST_PRECISIONS)
GIVEN, GIVEN_ENCODED = (Network(0.7),), (Network(0.7, "piecewise"),)
LINEARS = (LINEAR, ADDITIVE)
EVERY = (*NETWORKS, *ENCODED, *LINEARS, FOURIER)


def plan(m: int = 60, *more: int, n_groups: int | None = None, **options) -> Settings:
    """Settings of m rows, of three columns unless the shape goes on otherwise."""
    shape = Shape((m, *(more or (3,))), n_groups=n_groups)
    return resolve(BLLRegressor(**options).get_params(deep=False), shape, seed=0)


def families(m: int = 60, *more: int, **options) -> tuple[Family, ...]:
    return plan(m, *more, **options).ensemble.families


def members(m: int, **options) -> int:
    return plan(m, **options).ensemble.n_members


def kinds(m: int, *more: int, **options) -> str:
    """First letters of the kinds of splits."""
    X = torch.from_numpy(np.random.default_rng(0).normal(size=(m, *(more or (3,)))))
    rows = Rows(Points(X, Readings(torch.zeros(m, 1).double())))
    splits = folds_for(plan(m, *more, **options), rows, splitter=options.get("calibration"))
    return "".join(split.kind[0] for split in splits)


@pytest.mark.parametrize(
    ("m", "options", "rows", "what", "n_members", "wanted", "splits"),
    [
        (250, {}, "folds", "curve", 5, EVERY, "rrrrrbbbbbsss"),
        (40, {"input_skip": False}, "folds", "curve", 20, (*NETWORKS, FOURIER), "r" * 20 + "bbbbbsss"),
        (40, {"calibration": KFold(3)}, "given", "curve", 20, EVERY, "ggg"),
        (40, {"n_members": 10}, "folds", "curve", 10, EVERY, "r" * 10 + "bbbbbsss"),
        (40, {"n_members": 2}, "folds", "curve", 2, EVERY, "rrrrrbbbbbsss"),  # five folds, two of which are kept
        (40, {"n_members": 1}, "folds", "curve", 1, NETWORKS[1:], "rrrrrbbbbbsss"),
        (250, {"hidden_prior": 1.0}, "folds", "curve", 5, (Network(1.0),), "rrrrrbbbbbsss"),
        (5001, {"hidden_prior": 1.0}, "folds", "curve", 10, (Network(1.0),), "r" * 10 + "bbs"),
        (40, {"preset": "evidence"}, None, None, 1, (NETWORK,), ""),
        (40, {"preset": "evidence", "n_members": 3}, None, None, 3, (NETWORK,), ""),
        (40, {"backbone": nn.Linear(3, 2)}, "holdout", "curve", 1, (NETWORK,), "r"),
        (40, {"backbone": lambda: nn.Linear(3, 2), "n_members": 2}, "folds", "curve", 2, (NETWORK,), "rrrrrbbbbbsss"),
        (40, {"calibration": "alpha", "n_members": 3}, "folds", "alpha", 3, (NETWORK,), "bbbbb"),
        (40, {"calibration": None}, None, None, 1, (NETWORK,), ""),
        (40, {"calibration": None, "hidden_prior": 2.0}, None, None, 1, (Network(2.0),), ""),
        (4, {}, None, None, 1, (NETWORK,), ""),
    ],
)
def test_what_auto_means(m, options, rows, what, n_members, wanted, splits):
    found = plan(m, **options)
    assert found.plan == Plan(rows, what)
    assert (found.ensemble.n_members, found.ensemble.families) == (n_members, wanted)
    assert kinds(m, **options) == splits


def test_own_networks_hold_rows_out_once_where_there_are_enough_and_see_their_inputs_as_they_are():
    assert [plan(m, backbone=nn.Linear(3, 2)).plan.rows for m in (19, 20)] == [None, "holdout"]
    assert kinds(40, 1, 4, 4, backbone=lambda: nn.Flatten(), n_members=2) == "rrrrr"
    for encoding in ("auto", "raw"):
        assert families(backbone=nn.Linear(3, 2), encoding=encoding) == PLAIN
        assert families(backbone=nn.Linear(3, 2), hidden_prior=0.7, encoding=encoding) == GIVEN


def test_validation_data_calibrate_a_mixture_whose_networks_see_every_row():
    parameters = BLLRegressor().get_params(deep=False)
    found = resolve(parameters, Shape((250, 3), validation=True), seed=0)
    assert found == replace(plan(250), plan=Plan("validation", "curve"))
    tuned = resolve(parameters | {"calibration": "alpha"}, Shape((250, 3), validation=True), seed=0)
    assert (tuned.plan, tuned.ensemble.families) == (Plan("validation", "alpha"), (NETWORK,))


def test_the_fewer_the_rows_the_more_folds_a_mixture_has():
    rows = (20, 99, 100, 249, 250, 10_000)
    assert [members(m) for m in rows] == [20, 20, 10, 10, 5, 10]
    assert [members(m, preset="fast") for m in (19, *rows)] == [19] + [5] * 6
    # copies count as one, but many of them are as long to train on as other rows
    assert [members(m, n_groups=99) for m in (249, 250)] == [20, 10]
    assert members(400, n_groups=12) == 12


def test_fast_has_one_prior_precision_and_fewer_steps():
    (precision,) = FAST_PRECISIONS
    fast, full, own = plan(300, preset="fast"), plan(300), Network(precision)
    every = (own, replace(own, encoding="piecewise"), LINEAR, ADDITIVE, FOURIER)
    ensemble, training = EnsembleSettings(every, N_FOLDS, 3), replace(full.training, max_epochs=75)
    assert fast == replace(full, ensemble=ensemble, training=training)
    assert [plan(m, preset="fast").training.max_epochs for m in (5001, 1_000_000)] == [16, 1]  # 80 steps, or one pass
    assert families(300, preset="fast", n_members=10) == every


def test_the_more_rows_the_wider_the_hidden_layers():
    widths = {20: 5, 35: 5, 36: 6, 299: 49, 300: 50, 100_000: 50}
    assert {m: plan(m).network.hidden for m in widths} == {m: (width, width) for m, width in widths.items()}
    assert plan(300, n_groups=60).network.hidden == (10, 10)
    assert plan(300, hidden=[7]).network.hidden == (7,)


def test_a_source_has_the_widest_hidden_layers():
    """Its rows are not counted in advance, and are taken to be many."""
    for options in ({}, {"encoding": "raw"}):
        source = resolve(BLLRegressor(**options).get_params(deep=False), Shape(None, validation=True), seed=0)
        assert (source.plan, source.network.hidden) == (Plan("validation", "curve"), (50, 50))
        assert (source.ensemble.n_members, source.ensemble.families) == (1, (NETWORK,))
        assert (source.training.batch_size, source.training.early_stopping) == (4096, False)


def test_noise_may_depend_on_the_input_where_a_curve_is_calibrated_on_a_table():
    noise = lambda *shape, **options: plan(*shape, **options).layer
    assert noise(40).noise == noise(40, calibration=KFold(3), n_members=2).noise == "auto"
    for options in ({"preset": "evidence"}, {"calibration": None}, {"calibration": "alpha"}):
        assert noise(40, **options).noise == "diagonal"
    assert noise(40, 1, 4, 4, backbone=lambda: nn.Flatten(), n_members=2).noise == "diagonal"
    assert [noise(40, noise=given).noise for given in STRUCTURES] == list(STRUCTURES)


def test_the_noise_of_calibrated_built_in_networks_has_a_weak_prior_and_others_none():
    assert plan(40).layer.noise_prior == plan(40, hidden_prior=1.0).layer.noise_prior == WEAK_NOISE_PRIOR
    for options in ({"preset": "evidence"}, {"calibration": "alpha"}, {"backbone": nn.Linear(3, 2)}):
        assert plan(40, **options).layer.noise_prior == NO_NOISE_PRIOR


def test_auto_is_the_same_at_every_size_but_for_the_thresholds_it_names():
    """Rows of a mini-batch, epochs, learning rate and early stopping follow from the size of the table."""
    small, large = plan(999).training, plan(1000).training
    assert (small.batch_size, small.max_epochs, small.learning_rate) == (None, 250, 0.04)
    assert (large.batch_size, large.max_epochs, large.learning_rate) == (512, 128, 0.04)  # 250 steps
    large = plan(5001).training
    assert (large.batch_size, large.max_epochs) == (1024, 52)
    assert plan(100_000).training.max_epochs == 9
    small, large = (plan(m, preset="evidence", **training(early_stopping=False)).training for m in (5000, 5001))
    assert (small.batch_size, small.max_epochs, small.learning_rate) == (None, 250, 0.04)
    assert (large.batch_size, large.max_epochs, large.learning_rate) == (1024, 82, 0.04)  # 400 steps
    assert [plan(m, preset="evidence").training.early_stopping for m in (99, 100)] == [False, True]
    assert not plan(100).training.early_stopping


FAST_PIECEWISE, FAST_EVERY = (*FAST_ENCODED, ADDITIVE, FOURIER), (*FAST, *FAST_ENCODED, *LINEARS, FOURIER)


@pytest.mark.parametrize(
    ("options", "raw", "piecewise", "both"),
    [
        ({}, (*NETWORKS, LINEAR, FOURIER), (*ENCODED, ADDITIVE, FOURIER), EVERY),
        ({"preset": "fast"}, (*FAST, LINEAR, FOURIER), FAST_PIECEWISE, FAST_EVERY),
        ({"n_members": 1}, NETWORKS[1:], ENCODED[1:], NETWORKS[1:]),  # no mixture: networks of one encoding
        ({"hidden_prior": 0.7}, GIVEN, GIVEN_ENCODED, GIVEN),
        ({"hidden_prior": 0.7, "n_members": 2}, GIVEN, GIVEN_ENCODED, GIVEN),
        ({"calibration": "alpha"}, PLAIN, ENCODED_PLAIN, PLAIN),
        ({"preset": "evidence"}, PLAIN, ENCODED_PLAIN, PLAIN),
    ],
)
def test_an_encoding_is_that_of_all_networks_or_of_half_of_a_mixture(options, raw, piecewise, both):
    for encoding, wanted in {"raw": raw, "piecewise": piecewise, "auto": both}.items():
        assert families(**options, encoding=encoding) == wanted
    assert families(**options) == families(**options, encoding="auto")


@pytest.mark.parametrize(
    ("encoding", "skip"), [("auto", "auto"), ("raw", "auto"), ("piecewise", "auto"), ("auto", False), ("raw", False)]
)
def test_below_twenty_rows_no_network_is_trained_and_each_row_is_held_out_alone(encoding, skip):
    given = {"encoding": encoding, "input_skip": skip}
    assert families(19, **given) == families(5, **given) == (LINEAR, FOURIER)
    assert (members(19, **given), kinds(19, **given)) == (19, "r" * 19 + "bbbbbsss")
    assert any(family.trained for family in families(20, **given))
    assert families(4, **given) == (ENCODED_PLAIN if encoding == "piecewise" else PLAIN)  # not calibrated
    assert kinds(5, **given) == "rrrrrbbsss"  # a block has two rows at least


def test_processes_are_for_tables_of_every_size():
    assert families(20) == families(5000) == families(5001, n_groups=5000) == EVERY
    assert families(5001) == (NETWORKS[0], replace(NETWORKS[1], activation="silu"), *ENCODED, *LINEARS, FOURIER)
    assert families(5001, encoding="piecewise") == (*ENCODED, ADDITIVE, FOURIER)
    assert [plan(m).network.n_frequencies for m in (199, 200, 5000, 5001)] == [128, 256, 256, 128]


def test_many_columns_are_encoded_only_if_that_is_asked_for():
    raw = (*NETWORKS, LINEAR, FOURIER)
    assert [families(60, d) for d in (100, 101)] == [EVERY, raw]
    assert families(60, 101, encoding="raw") == raw
    assert families(60, 101, encoding="piecewise") == (*ENCODED, ADDITIVE, FOURIER)


@pytest.mark.parametrize("early_stopping", [False, True])  # trained as one batch, or one by one
def test_networks_have_the_activation_of_their_family_in_memory_and_in_files(early_stopping, monkeypatch, tmp_path):
    monkeypatch.setattr(getmodule(resolve), "LARGE_TABLE", 50)
    X, y = sine(60)
    options = TrainingOptions(early_stopping=early_stopping)
    model = BLLRegressor(preset="fast", hidden=(3,), max_epochs=1, training=options, random_state=0).fit(X, y)
    loaded = reloaded(model, tmp_path)
    for each in (model, loaded):
        networks = [member for member in each.members_ if member.family.trained]
        wanted = {"raw": "silu", "piecewise": "tanh"}
        assert {member.family.encoding for member in networks} == set(wanted)
        for member in networks:
            assert parts_of(member.network)[0].activation == wanted[member.family.encoding]
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


def test_an_activation_that_was_given_is_that_of_every_network():
    for rows in (60, 5_001):
        assert {family.activation for family in families(rows, activation="relu")} == {None}
    assert families(5_001, n_members=1) == NETWORKS[1:]  # no mixture
    assert families(5_001, preset="fast") == (replace(FAST[0], activation="silu"), *FAST_ENCODED, *LINEARS, FOURIER)


def test_without_inputs_passed_on_nothing_is_encoded():
    """Outside the data an encoding is constant: only the inputs passed on let the variance grow."""
    without, raw = families(input_skip=False), families(input_skip=False, encoding="raw")
    assert without == raw == (*NETWORKS, FOURIER)  # no linear members either
    assert families(input_skip=True) == families()


@pytest.mark.parametrize(
    ("options", "families"),
    [
        pytest.param({"encoding": "raw"}, {*FAST, LINEAR, FOURIER}, id="raw"),
        pytest.param({"encoding": "piecewise"}, {*FAST_ENCODED, ADDITIVE, FOURIER}, id="piecewise"),
        pytest.param({"encoding": "piecewise", "n_members": 2, "hidden_prior": 0.7}, {*GIVEN_ENCODED}, id="two"),
    ],
)
def test_members_are_of_the_encoding_that_was_asked_for(options, families):
    model = fit({"preset": "fast"} | options)
    assert {member.family for member in model.members_} == families == set(model.calibration_.curves)
    for member in model.members_:
        assert (parts_of(member.network)[1] is None) == (member.family.encoding == "raw")


KINDS_OF_NETWORKS = [
    (0.1 + 0.2,),
    (5e-324,),
    (0.1 + 0.2, "piecewise"),
    (0.3, "raw", "silu"),
    (0.3, "piecewise", "silu"),
]


@pytest.mark.parametrize("family", [NETWORK, LINEAR, FOURIER, ADDITIVE, *(Network(*of) for of in KINDS_OF_NETWORKS)])
def test_a_family_is_read_back_as_it_was_written(family):
    assert Family.parse(str(family)) == family
    assert (str(LINEAR), str(ADDITIVE)) == ("linear", "piecewise linear")
    assert str(Network(0.3, "piecewise")) == "piecewise network 0.3"


NO_FAMILIES = "|tree|Network 0.3|silu linear|relu network 0.3|network -1.0|network nan|network inf|network x|piecewise"
NO_FAMILIES += "|piecewise tree|raw linear|linear piecewise|piecewise piecewise linear"


@pytest.mark.parametrize("text", NO_FAMILIES.split("|"))
def test_what_is_no_family_is_refused(text):
    refused(r"not a family of members|could not convert", Family.parse, text, error=ValueError)
