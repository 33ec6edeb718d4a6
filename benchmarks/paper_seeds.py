"""How the study's figures vary with the data and with members: `python -m benchmarks.paper_seeds`.

For each seed of the data, networks from many initialisations, alpha^max tuned on blocks of the training range that the
features never saw; the test LPD of one network, and of mixtures of ten of them.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from lastlayer.prediction import Prediction
from lastlayer.studies.data import SEED, paper_data
from lastlayer.studies.networks import BUDGET, Budget, Scalers, fit_networks

MEMBERS = 10


@dataclass(frozen=True)
class Row:
    """Test LPD for one seed of the data, standardised units, joint over the outputs; a number an initialisation."""

    data_seed: int
    star: Float[ndarray, " s"]
    honest: Float[ndarray, " s"]
    leak: Float[ndarray, " s"]
    ten_members: Float[ndarray, " s"]
    """Of the mixture of ten networks that starts at each initialisation and goes round."""


def run(data_seed: int, n: int, *, loss: str = "profiled", budget: Budget = BUDGET, progress: bool = False) -> Row:
    """Fit n initialisations and score them alone and ten at a time."""
    data = paper_data(data_seed)
    networks = fit_networks(data, list(range(n)), loss=loss, budget=budget, progress=progress)
    unit = float(np.log(Scalers.of(data.train).targets.scale.numpy()).sum())

    def lpd(prediction: Prediction) -> float:
        return float(prediction.log_prob(data.test.y).mean()) + unit

    X = data.test.X
    honest = [network.predict(X, network.honest.log_alpha) for network in networks]
    ten = [Prediction.mixture([honest[(i + j) % n] for j in range(min(MEMBERS, n))]) for i in range(n)]
    return Row(
        data_seed,
        star=np.array([lpd(network.predict(X, float(network.posterior.log_alpha))) for network in networks]),
        honest=np.array([lpd(p) for p in honest]),
        leak=np.array([lpd(network.predict(X, network.leak.log_alpha)) for network in networks]),
        ten_members=np.array([lpd(p) for p in ten]),
    )


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description="Test LPD over data seeds, alone and ten members at a time.")
    parser.add_argument("--data-seeds", type=int, nargs="+", default=[SEED, *range(10)])
    parser.add_argument("--initialisations", type=int, default=20)
    parser.add_argument("--loss", choices=("profiled", "evidence"), default="profiled", help="evidence: the paper's")
    parser.add_argument("--max-epochs", type=int, default=BUDGET.max_epochs)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # many small products: a second thread only waits for the first
    names = ("star", "honest", "leak", "ten_members")
    print("| data seed | alpha* | alpha^max honest | alpha^max leak | ten members, honest |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    rows = []
    for seed in options.data_seeds:
        budget = Budget(max_epochs=options.max_epochs)
        row = run(seed, options.initialisations, loss=options.loss, budget=budget, progress=True)
        rows.append(row)
        print(f"| {seed} | " + " | ".join(_cell(getattr(row, name)) for name in names) + " |", flush=True)
    return rows


def _cell(values: ndarray) -> str:
    return f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"


if __name__ == "__main__":
    main()
