"""`attach` on ids, on several inputs, on convolutions, and on many rows per sample."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import close, exact_layer, refused, reloaded
from torch import Tensor, nn

from lastlayer import BLLRegressor, attach
from lastlayer.bayes.features import affine_features
from lastlayer.data.observe import Sum
from lastlayer.data.sources import LoaderSource
from lastlayer.integrations.casadi import to_casadi
from lastlayer.networks.feature_extractor import FeatureExtractor
from lastlayer.online import OnlineModel

M, TOKENS, WORDS, K = 40, 5, 11, 6


class Tokens(nn.Module):
    """As Hugging Face has them: inputs by name, an object with logits; `pooled`: one row per sample."""

    def __init__(self, q: int = 1, *, pooled: bool = False) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WORDS, K), nn.Sequential(nn.Linear(K, K), nn.Tanh())
        self.head, self.pooled = nn.Linear(K, q), pooled

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64
        phi = self.body(self.embedding(input_ids))
        return (phi * attention_mask[..., None]).sum(1) if self.pooled else phi

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.features(input_ids, attention_mask)))


@pytest.fixture
def text() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (M, TOKENS), generator=g)
    mask = (torch.arange(TOKENS) < torch.randint(2, TOKENS + 1, (M, 1), generator=g)).long()
    return {"input_ids": ids, "attention_mask": mask}


def tokens(q: int = 1, **more) -> Tokens:
    torch.manual_seed(1)
    return Tokens(q, **more).eval()


def noisy(values: Tensor) -> Tensor:
    return values.detach() + 0.1 * torch.randn(values.shape, generator=torch.Generator().manual_seed(3))


def split(inputs: dict[str, Tensor], y: Tensor, size: int = 16) -> list[dict[str, Tensor]]:
    """Batches as a loader of dictionaries gives them."""
    both = inputs | {"labels": y}
    return [{name: x[i : i + size] for name, x in both.items()} for i in range(0, len(y), size)]


def by_hand(phi: Tensor, T: Tensor, at: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the exact posterior, row by row."""
    Phi, at = (affine_features(x.detach().double()) for x in (phi, at))
    mean, cov, _ = exact_layer(Phi, T, at, weight)
    return mean, cov.diagonal(dim1=-2, dim2=-1).sqrt()


def check(model: BLLRegressor, X, mean: Tensor, std: Tensor) -> None:
    said = model.predict(X, return_std=True)
    close(torch.tensor(said[0]), mean, loose=1e4)  # float32 features of batches of other sizes
    close(torch.tensor(said[1]), std, loose=1e5)


def test_dictionaries_with_ids_give_the_posterior_of_the_pooled_features(text):
    network = tokens(2, pooled=True)
    y = noisy(network(**text).logits)
    model = attach(network, split(text, y))
    phi = network.features(**text)
    assert type(model) is BLLRegressor
    check(model, text, *by_hand(phi, y, phi))
    w = torch.rand(M, generator=torch.Generator().manual_seed(2)) + 0.5  # entries of a dictionary have names
    named = attach(network, LoaderSource([text | {"energy": y, "w": w}], targets="energy", weight="w"))
    check(named, text, *by_hand(phi, y, phi, w))


def test_every_token_is_a_row_and_padding_is_none(text):
    network = tokens(2)
    y, kept = noisy(network(**text).logits), text["attention_mask"] > 0
    phi = network.features(**text)
    mean, std = by_hand(phi[kept], y[kept], phi.flatten(0, 1))
    masked = attach(network, split(text, y))
    check(masked, text, mean.view(y.shape), std.view(y.shape))
    # without a mask that the network is told of: NaN says the same, as does a weight
    bare, ids = nn.Sequential(network.embedding, network.body, network.head), text["input_ids"]
    for batch in ((ids, y.where(kept[..., None], torch.nan)), (ids, y, kept.double())):
        check(attach(bare, [batch]), ids, mean.view(y.shape), std.view(y.shape))
    # and so do integer targets of -100
    whole, t = text | {"attention_mask": torch.ones_like(kept).long()}, (10 * y[..., 0]).round().long()
    one = tokens(1)
    mean, std = by_hand(phi[kept], t[kept][:, None].double(), phi.flatten(0, 1))
    check(attach(one, split(whole, t.where(kept, -100))), text, mean.view(M, TOKENS), std.view(M, TOKENS))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 4), nn.Linear(7, 1)

    def features(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.cat([self.embedding(ids).mean(1), torch.tanh(x)], 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.out(self.features(ids, x))[:, 0]


def test_several_inputs_are_given_in_their_order(text):
    torch.manual_seed(0)
    network, x = Two(), torch.randn(M, 3, dtype=torch.float64)
    inputs = text["input_ids"], x  # float64 becomes float32, ids stay ids
    y = noisy(network(text["input_ids"], x.float()))
    phi = network.features(text["input_ids"], x.float())
    model = attach(network, [((text["input_ids"][part], x[part]), y[part]) for part in torch.arange(M).split(16)])
    mean, std = by_hand(phi, y[:, None], phi)
    check(model, inputs, mean[:, 0], std[:, 0])


@pytest.mark.parametrize(("convolution", "space"), [(nn.Conv1d, (7,)), (nn.Conv2d, (4, 3))])
@pytest.mark.parametrize("q", [1, 2])
def test_a_convolution_of_size_1_is_a_linear_layer_at_every_position(convolution, space, q):
    torch.manual_seed(0)
    body = nn.Sequential(convolution(2, K, 3, padding=1), nn.Tanh())
    network, x = nn.Sequential(body, convolution(K, q, 1)), torch.randn(12, 2, *space)
    y = noisy(network(x))
    phi = body(x).movedim(1, -1)
    mean, std = by_hand(phi.flatten(0, -2), y.movedim(1, -1).flatten(0, -2), phi.flatten(0, -2))
    model = attach(network, [(x[:5], y[:5]), (x[5:], y[5:])])
    shaped = lambda values: values.view(12, *space, q).movedim(-1, 1)
    check(model, x, shaped(mean), shaped(std))
    if q == 1:
        squeezed = attach(nn.Sequential(network, nn.Flatten(1, 2)), [(x, y[:, 0])])
        check(squeezed, x, mean.view(12, *space), std.view(12, *space))


def test_a_convolution_after_pooling_has_one_row_per_sample():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, K, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1))
    network, x = nn.Sequential(body, nn.Conv2d(K, 2, 1), nn.Flatten()), torch.randn(30, 1, 5, 5)
    y = noisy(network(x))
    model = attach(network, [(x, y)])
    assert type(model) is BLLRegressor
    check(model, x, *by_hand(body(x).flatten(1), y, body(x).flatten(1)))
    close(torch.tensor(model.features(x)), body(x).flatten(1).double(), loose=1e4)  # batches of another size


def test_features_may_be_logits_or_hidden_states(text):
    network = tokens()
    y = noisy(network(**text).logits)
    model = attach(network, split(text, y), layer=None)  # one feature: what the network predicts
    kept, phi = text["attention_mask"] > 0, network(**text).logits
    mean, std = by_hand(phi[kept], y[kept], phi.flatten(0, 1))
    check(model, text, mean.view(y.shape), std.view(y.shape))

    class Body(nn.Module):
        def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
            return {"last_hidden_state": network.features(**inputs)}

    phi = network.features(**text)
    mean, std = by_hand(phi[kept], y[kept], phi.flatten(0, 1))
    check(attach(Body(), split(text, y), layer=None), text, mean.view(y.shape), std.view(y.shape))


def test_it_does_what_fitted_models_do(text, tmp_path):
    network = tokens(2)
    y = noisy(network(**text).logits)
    model = attach(network, split(text, y), calibration=split(text, y + 0.3, size=15))
    held = attach(network, split(text, y)).calibrate(text, y + 0.3)
    mean, std = model.predict(text, return_std=True)
    np.testing.assert_allclose(held.predict(text, return_std=True)[1], std, rtol=1e-3)
    assert model.calibration_.lpd > model.calibration_.lpd_before
    again = reloaded(model, tmp_path, backbone=FeatureExtractor(Tokens(2), "head"))
    np.testing.assert_array_equal(again.predict(text, return_std=True)[1], std)
    said = model.module()(**text)
    np.testing.assert_allclose(said["mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(said["var"], std**2, rtol=1e-12)
    rows = model.predictive(text)
    np.testing.assert_array_equal(rows.mean.reshape(mean.shape), mean)
    assert model.joint(text).mean.shape == model.sample_y(text)[..., 0].shape == (M * TOKENS, 2)
    assert (model.extrapolation({**text, "input_ids": 0 * text["input_ids"]}).affine_cost > 0).all()
    before = rows.epistemic_var
    assert (held.update(text, y).predictive(text).affine_cost < rows.affine_cost).all()
    assert (model.tune_alpha(text, y).conformalize(text, y).predictive(text).epistemic_var != before).any()
    assert np.isfinite(model.predictive(text).interval(0.9, method="conformal")).all()


def test_features_are_a_table_for_all_that_takes_fitted_models(text, tmp_path):
    network = tokens(2)
    model = attach(network, split(text, noisy(network(**text).logits)))
    phi, mean = model.features(text), model.predict(text)
    online = OnlineModel(model)
    np.testing.assert_allclose(online.predictive(phi).mean.reshape(mean.shape), mean, rtol=1e-9)
    said = to_casadi(model)(phi[0])
    np.testing.assert_allclose(said[0].full().ravel(), mean[0, 0], rtol=1e-9)
    whole = model.predictive_of(Sum(phi.reshape(M, TOKENS, K), output=1))  # over the words of each sentence
    np.testing.assert_allclose(whole.mean, mean[..., 1].sum(1), rtol=1e-9)
    close(torch.tensor(whole.cov()), pooled_cov(model.joint(text, noise=False), 1), loose=1e3)


def pooled_cov(joint, output: int) -> Tensor:
    """Of the sums over tokens, entry by entry."""
    cov = joint.cov_of_outputs()[..., output].reshape(M, TOKENS, M, TOKENS)
    return torch.tensor(cov.sum((1, 3)))


def test_updates_are_one_attach_of_all_rows(text):
    """Alpha and noise found again, which the sums allow."""
    network = tokens(1)
    y = noisy(network(**text).logits)
    both = {name: torch.cat([x, x.flip(0)]) for name, x in text.items()}
    whole = attach(network, split(both, torch.cat([y, y + 0.2])))
    model = attach(network, split(text, y))
    flipped = {name: x.flip(0) for name, x in text.items()}
    kept = (flipped["attention_mask"] > 0)[..., None]
    model.update(flipped, (y + 0.2).where(kept, torch.nan)).reestimate()
    np.testing.assert_allclose(model.predict(text), whole.predict(text), rtol=1e-5, atol=1e-6)


def test_what_is_wrong_with_batches_is_said(text, as_a_user):
    network = tokens(2)
    y = noisy(network(**text).logits)
    apart = r"shape \(40, 5, 6\) and the targets \(40, 2\).*200 positions.*pool the features"
    batches = {
        "'input_ids', 'attention_mask'.*in place of one with 'labels'.*targets=...": [text],
        apart: split(text, y[:, 0], size=M),
        "gives 2 numbers, and the targets have 3": split(text, torch.cat([y, y[..., :1]], -1)),
        "only a part of their targets": split(text, y.where(torch.tensor([True, False]), torch.nan)),
        "y has NaN or infinite": split(text, y / 0),
        "'note' is a list, not a tensor": [text | {"labels": y, "note": ["a", "b"]}],
    }
    for told, given in batches.items():
        refused(told, attach, network, given)
    linear, integers = nn.Linear(TOKENS, 1), [(text["input_ids"], y[:, 0, 0])]
    refused(r"failed on X, given as integers.*X\.float", attach, linear, integers, layer=None)
    pair = torch.randn(4, 3), torch.randn(4)
    refused("neither logits nor last_hidden_state", attach, nn.GRU(3, 4), [pair], layer=None)
    source = LoaderSource(split(text, y[:, 0]))
    refused("2 inputs .*one tensor.*lastlayer.attach", BLLRegressor(hidden=(4,)).fit_source, source)
    model = attach(network, split(text, y))
    refused("attach.* again", model.fit, text, y)
    refused("y has 1 outputs, but the model was fitted to 2", model.update, text, y[..., 0])
    refused(r"joint\(X\)", model.predict, text, return_cov=True)


class Bag(nn.Module):
    """The mean of the words of a sentence, through a layer; integers must come as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, 4), nn.Linear(4, K)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        return torch.tanh(self.layer(self.embedding(ids).mean(1)))


@pytest.fixture
def sentences() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, WORDS, (150, TOKENS))
    return ids, np.cos(1.3 * ids).sum(1) + 0.1 * rng.standard_normal(150)


def test_a_frozen_backbone_of_ids_is_what_attach_makes_of_it(sentences):
    ids, y = sentences
    torch.manual_seed(0)
    backbone = Bag().double().requires_grad_(False)
    fitted = BLLRegressor(backbone=backbone, preset="evidence", random_state=0).fit(ids, y)
    attached = attach(backbone, [(ids, y)], layer=None)
    said, other = (model.predict(ids, return_std=True) for model in (fitted, attached))
    np.testing.assert_allclose(said, other, rtol=1e-9)
    assert fitted.settings_.network.ids
    cost = fitted.predictive(ids).affine_cost
    np.testing.assert_allclose(fitted.predictive(ids[:, ::-1]).affine_cost, cost, rtol=1e-9)  # words in any order


@pytest.mark.parametrize("way", ["rows", "mini-batches", "source", "mixture"])
def test_backbones_learn_from_ids_by_every_way(way, sentences, tmp_path):
    ids, y = sentences
    torch.manual_seed(0)
    given = {"backbone": Bag(), "max_epochs": 40, "random_state": 0}
    if way == "source":
        batches = [(ids[part], y[part]) for part in np.array_split(np.arange(120), 4)]
        model = BLLRegressor(**given).fit_source(LoaderSource(batches), validation_data=(ids[120:], y[120:]))
    elif way == "mixture":
        model = BLLRegressor(**given | {"backbone": Bag, "max_epochs": 10}, n_members=2).fit(ids, y)
    else:
        model = BLLRegressor(**given, batch_size=40 if way == "mini-batches" else None).fit(ids, y)
    assert np.std(model.predict(ids) - y) < 0.7 * np.std(y)
    with torch.no_grad():
        said = model.module()(torch.tensor(ids))["var"]
    np.testing.assert_allclose(said[:, 0], model.predict(ids, return_std=True)[1] ** 2, rtol=1e-12)
    again = reloaded(model, tmp_path, backbone=Bag())
    np.testing.assert_array_equal(again.predict(ids), model.predict(ids))
    assert (again.update(ids, y).predictive(ids, noise=False).affine_cost <= model.predictive(ids).affine_cost).all()


def test_integers_and_numbers_are_not_taken_for_each_other(sentences, as_a_user):
    ids, y = sentences
    model = BLLRegressor(backbone=Bag(), preset="evidence", max_epochs=2).fit(ids, y)
    refused(r"fitted to integers.*float64", model.predict, ids.astype(float))
    refused(r"fitted to integers.*float64", model.update, ids.astype(float), y)
    numbers = BLLRegressor(backbone=nn.Linear(TOKENS, 3), preset="evidence", max_epochs=2)
    refused(r"failed on X, given as integers.*X\.float", numbers.fit, ids, y)
    numbers.fit(ids.astype(float), y)  # columns of numbers are standardised, whatever type they have afterwards
    np.testing.assert_array_equal(numbers.predict(ids), numbers.predict(ids.astype(float)))
    passed = BLLRegressor(backbone=Bag(), input_skip=True)
    refused("input_skip=True needs a table, but X has integers", passed.fit, ids, y)
