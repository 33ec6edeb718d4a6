"""Rows of the peers: their tuning and the packages they need."""

from benchmarks.uci import boosting, gaussian_boosting, gaussian_processes, last_layers, networks
from benchmarks.uci.protocol import Method

TARGET = "make bench-uci"
"""Make target that sets up the environment of the peers."""

_TREES = (
    f"at most {gaussian_boosting.TREES:,} trees, learning rate {gaussian_boosting.SHRINKAGE:g}; held-out likelihood "
    "chooses their number and the depth"
)
PEERS = (
    Method(
        "vbll",
        "neural",
        "variational last layer (dense covariance, prior scale 1, Wishart scale 0.1) as in its regression tutorial: "
        "AdamW, weight decay 1e-4 on the features, gradients clipped at 1; batches of 64 at 1e-2 with a cosine "
        "schedule, at most 600 epochs or, if that is more, 8,000 steps; held-out likelihood chooses the epoch and ReLU "
        "or the tutorial's ELU",
        last_layers.vbll,
        packages=("vbll",),
        modules=("vbll",),
    ),
    Method(
        "laplace-torch",
        "neural",
        "squared error and weight decay by Adam (1e-2, cosine, batches of 100, at most 800 epochs); held-out error "
        "chooses the epoch, held-out likelihood of the approximation the decay (0, 1e-5, 1e-4, 1e-3) and ReLU or "
        "tanh; last layer, full Hessian; prior precision and noise by 1,000 steps on the marginal likelihood as in "
        "its regression example",
        last_layers.laplace,
        packages=("laplace-torch",),
        modules=("laplace",),
    ),
    Method(
        "deep ensemble",
        "neural",
        "five networks with mean and variance, Gaussian likelihood, Adam (2e-2, cosine, batches of 100, at most "
        "1,200 epochs), no adversarial rows; held-out likelihood of the mixture chooses the epoch and the weight "
        "decay (0, 1e-5, 1e-4, 1e-3)",
        networks.deep_ensemble,
    ),
    Method(
        "MC dropout",
        "neural",
        "dropout at inputs and hidden units, Adam (3e-3, cosine, batches of 100, at most 2,000 epochs), length "
        "scale 1e-2; held-out likelihood chooses the epoch, the rate (0.005, 0.01, 0.05, 0.1) and the noise (25 "
        "values of tau); 200 passes as a mixture",
        networks.mc_dropout,
    ),
    Method(
        "conformal network",
        "neural",
        "a plain network by squared error (Adam 1e-2, cosine, batches of 100, at most 800 epochs; epoch and weight "
        "decay by held-out error); absolute errors of another 20% of the training rows, which it never saw, give "
        "symmetric intervals; no density, so no LPD",
        networks.conformal,
    ),
    Method(
        "Gaussian process",
        "other",
        "GPyTorch, Matern 5/2 with one length scale per input, 200 steps of Adam (0.1, cosine) on the exact marginal "
        "likelihood; above 3,000 rows these on 3,000 random rows and then 5 on all; above 10,000 rows SVGP with 500 "
        "inducing points, 100 epochs of 1,024 rows, Adam 1e-2",
        gaussian_processes.gaussian_process,
        packages=("gpytorch", "linear_operator"),
        modules=("gpytorch",),
    ),
    Method(
        "boosted quantiles",
        "other",
        "scikit-learn's histogram gradient boosting, one model for each of 21 levels and one for the mean, learning "
        "rate 0.05, at most 500 trees; held-out pinball loss chooses the number of trees, the leaves (8, 31) and "
        "the minimum number of rows per leaf (5, 20); no density, so no LPD",
        boosting.boosting,
    ),
    Method(
        "NGBoost",
        "other",
        f"Gaussian, {_TREES} {gaussian_boosting.NGBOOST_DEPTHS}",
        gaussian_boosting.ngboost,
        packages=("ngboost",),
        modules=("ngboost",),
    ),
    Method(
        "CatBoost",
        "other",
        f"RMSEWithUncertainty, {_TREES} {gaussian_boosting.CATBOOST_DEPTHS}",
        gaussian_boosting.catboost,
        packages=("catboost",),
        modules=("catboost",),
    ),
)
