"""Variation of the study's figures with the data and with mixtures: `python -m benchmarks.paper_seeds`.

For each data seed, networks are trained from many initialisations, with alpha^max tuned on held-out blocks of the
training range. The table has the test LPD of single networks and of mixtures of ten.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from benchmarks.runner import options_of
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.studies.data import SEED, paper_data
from lastlayer.studies.networks import MAX_EPOCHS, Scalers, fit_networks

MEMBERS = 10


@dataclass(frozen=True)
class Row:
    """Test LPD for one data seed, in standardised units and joint over the outputs: one number per initialisation."""

    data_seed: int
    star: Float[ndarray, " s"]
    honest: Float[ndarray, " s"]
    leak: Float[ndarray, " s"]
    ten_members: Float[ndarray, " s"]
    """LPD of the mixture of ten successive networks that starts at each initialisation, cyclically."""


def run(data_seed: int, n: int, loss: str, max_epochs: int) -> Row:
    """Fit n initialisations and score them singly and in mixtures of ten."""
    data = paper_data(data_seed)
    networks = fit_networks(data, list(range(n)), loss=loss, max_epochs=max_epochs, progress=True)
    unit = float(np.log(Scalers.of(data.train).targets.scale.numpy()).sum())
    lpd = lambda predictions: np.array([float(p.log_prob(data.test.y).mean()) + unit for p in predictions])
    at = lambda log_alpha: [network.predict(data.test.X, float(log_alpha(network))) for network in networks]
    honest = at(lambda network: network.honest.log_alpha)
    ten = [MixturePrediction.mixture([honest[(i + j) % n] for j in range(min(MEMBERS, n))]) for i in range(n)]
    star, leak = at(lambda network: network.posterior.log_alpha), at(lambda network: network.leak.log_alpha)
    return Row(data_seed, *map(lpd, (star, honest, leak, ten)))


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = options_of(__doc__)
    parser.add_argument("--data-seeds", type=int, nargs="+", default=[SEED, *range(10)], help="seeds of the data")
    parser.add_argument("--initialisations", type=int, default=20, help="initialisations per data seed")
    losses = ("profiled", "evidence")
    parser.add_argument("--loss", choices=losses, default="profiled", help="evidence: the paper's recipe")
    parser.add_argument("--max-epochs", type=int, default=MAX_EPOCHS, help="maximum number of epochs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # many small products: a second thread only waits for the first
    names = ("star", "honest", "leak", "ten_members")
    print("| data seed | alpha* | alpha^max honest | alpha^max leak | ten members, honest |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    rows = []
    for seed in options.data_seeds:
        rows.append(run(seed, options.initialisations, options.loss, options.max_epochs))
        scores = [getattr(rows[-1], name) for name in names]
        cells = [f"{np.median(each):.2f} ({each.min():.2f} to {each.max():.2f})" for each in scores]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)
    return rows


if __name__ == "__main__":
    main()
