"""A user's script, as a type checker sees it: `make lint` runs mypy over it, and the names must have these types."""

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lastlayer
from lastlayer import BLLRegressor, Prediction
from lastlayer.bayes.affine_cost import affine_cost
from lastlayer.bayes.evidence import optimal_alpha, profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Marginals, Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.predictions.metrics import calibration_error


def front_door(X: np.ndarray, y: np.ndarray, path: Path) -> float:
    model = BLLRegressor(hidden=(10,), preset="evidence", noise="full", random_state=0)
    assert_type(model.fit(X, y), BLLRegressor)
    p = model.predictive(X)
    assert_type(p, Prediction)
    lower, upper = p.interval(0.9)
    assert_type((lower, upper), tuple[np.ndarray, np.ndarray])
    model.update(X, y, forgetting=0.9).tune_alpha(X, y).conformalize(X, y)
    model.save(path)
    assert_type(lastlayer.load(path, backbone=nn.Linear(1, 2)), BLLRegressor)
    assert_type(lastlayer.__version__, str)
    return calibration_error(p, y) + model.alpha_ + model.nlml_


def exchange(network: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    model = lastlayer.attach(network, loader, layer="head")
    assert_type(model, BLLRegressor)
    assert_type(model.module()(x), Any)  # calls of modules are untyped in torch
    loss = lastlayer.BLLLoss(n_rows=100)
    assert_type(loss.posterior(), Posterior)
    assert_type(loss.forward(x, x), Tensor)
    return loss(x, x)


def mathematics(phi: Tensor, T: Tensor) -> Tensor:
    Phi = affine_features(phi)
    statistics = Statistics.from_features(Phi, T) + Statistics.from_features(Phi, T)
    posterior = Posterior(statistics, optimal_alpha(statistics).log_alpha)
    assert_type(posterior.predict(Phi), Marginals)
    return profiled_nlml(Phi, T, torch.zeros(())) + affine_cost(phi, phi, 1.0).sum()
