"""Wrong formulas, each of which some test must catch: `python tests/mutants.py`, or with a NAME for one alone.

Every mutant changes one place of a copy of the package and runs there the tests that should notice.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600

CONFTEST = """\
import hypothesis

def pytest_sessionstart():  # a failure is enough: no time goes into making it small
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("first failure", hypothesis.settings(), phases=phases)
    hypothesis.settings.load_profile("first failure")

def pytest_terminal_summary(terminalreporter):
    import lastlayer
    terminalreporter.write_line(f"package: {lastlayer.__file__}")
"""


@dataclass(frozen=True)
class Mutant:
    """One wrong formula."""

    name: str
    file: str
    """Relative to src/lastlayer."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """The test file, or the one test in it, that should notice."""


E, P, S, X = "test_evidence.py", "test_posterior.py", "test_statistics.py", "test_extrapolation.py"
F, Y, M, R = "test_features.py", "test_prediction.py", "test_metrics.py", "test_regressor.py"
T, C, CF = "test_training.py", "test_calibration.py", "test_crossfit.py"
CA, D = "test_casadi.py", "test_dynamics.py"
LAGGED = f"{D}::test_lags_carry_their_covariances"
FIRST = f"{D}::test_the_first_step_of_sampled_weights_is_the_prediction"
BACK_OFF = "test_do_mpc.py::test_the_back_off_is_the_quantile_times_the_propagated_standard_deviation"
N, MODEL = "test_members.py", "test_model.py"
TABLES, EXPORT = "test_tables.py", "test_export.py"
SCALE, FROZEN, RUNNING = "test_scale.py", "training/frozen.py", "training/running.py"
SEEN = f"{SCALE}::test_weights_are_those_of_the_rows_that_were_seen"
RC, DRIFT = "test_recursion.py", "test_drift.py"
FADES, WINDOW, ANEW, NEVER, LEVERAGE, TUNED = (
    f"test_online.py::test_{name}"
    for name in (
        "fading_is_a_refit_with_weights_and_the_prior_does_not_fade",
        "a_window_is_a_refit_on_its_rows_after_many_steps",
        "alpha_and_noise_anew_are_those_of_the_last_layer_of_all_rows",
        "rows_that_were_never_in_are_refused_and_nothing_happens",
        "rows_of_high_leverage_leave_a_window_by_a_factorisation",
        "a_tuned_alpha_is_followed_and_keeps_its_distance",
    )
)
ATTACHING, SAYS = "test_attaching.py", "test_module.py::test_it_says_what_predictive_says"
MODULE, BEYOND = f"{SAYS}[mixture, full noise, alpha tuned]", f"{SAYS}[single, calibrated by groups]"
SCALED = f"{ATTACHING}::test_statistics_of_scaled_targets_follow_from_those_of_raw_ones"
BY_HAND = f"{ATTACHING}::test_it_is_the_posterior_of_the_features_written_down_by_hand"
TWO = f"{ATTACHING}::test_two_processes_give_the_answer_of_one"
FIRST_LOSS = f"{ATTACHING}::test_the_first_batch_of_all_rows_gives_the_evidence_and_its_gradient"
BT, BO = "test_botorch.py", "test_bo_study.py"
GAUSSIAN, SURROGATE = (f"integrations/botorch/{name}.py" for name in ("gaussian", "surrogate"))
CURVE, POINTS, SPLITS, CROSSFIT = (f"calibration/{name}.py" for name in ("curve", "points", "splits", "crossfit"))
COST, HULLS, TUNING = (f"extrapolation/{name}.py" for name in ("affine_cost", "hulls", "tuning"))

MUTANTS = [
    Mutant(
        "weights of a batch as if all rows had been seen",
        FROZEN,
        "mean = equations.at(log_alpha + math.log(seen))",
        "mean = equations.at(log_alpha)",
        SEEN,
    ),
    Mutant(
        "reach of an average by shares instead of their squares",
        RUNNING,
        "reach = 1 / ((1 - share) ** 2 / self.moment.reach + share**2 / used)",
        "reach = 1 / ((1 - share) / self.moment.reach + share / used)",
        SEEN,
    ),
    Mutant(
        "after a pass over all rows a batch counts as if there had been none",
        RUNNING,
        "share = max(share, used / (used + self.moment.reach))",
        "share = max(share, 1 / (self.steps + 1))",
        f"{SCALE}::test_after_a_refresh_a_batch_counts_as_the_rows_it_has",
    ),
    Mutant(
        "a pass over all rows leaves alpha where it was",
        RUNNING,
        "            log_alpha = _moved(log_alpha, frozen)\n            frozen = self._frozen",
        "            frozen = self._frozen",
        f"{SCALE}::test_a_refresh_touches_the_evidence_at_its_maximum_over_alpha",
    ),
    Mutant(
        "passes over all rows one step late",
        "training/batches.py",
        "if left == self.refresh.steps:",
        "if left == self.refresh.steps - 1:",
        f"{SCALE}::test_passes_over_all_rows_come_when_they_are_due",
    ),
    Mutant(
        "the log-determinant's part of the loss for one output whatever their number",
        FROZEN,
        "each = z @ self.inverse, share[..., :n] * (q * spread_scale)",
        "each = z @ self.inverse, share[..., :n] * spread_scale",
        SCALE,
    ),
    Mutant(
        "rows of the log-determinant that stand for themselves alone",
        FROZEN,
        "(q * spread_scale)",
        "float(q)",
        f"{SCALE}::test_the_log_determinant_on_some_rows_is_unbiased",
    ),
    Mutant(
        "a bound without the distance of the centres",
        FROZEN,
        "gram = gram + count * away[..., :, None] * away[..., None, :]",
        "gram = gram + 0 * away[..., :, None] * away[..., None, :]",
        f"{SCALE}::test_the_bound_is_never_below_the_evidence",
    ),
    Mutant(
        "statistics of processes added without what lies between their means",
        "ranks.py",
        "rest = self.sum_(torch.cat([statistics.scatter + between, energy[..., None, :]], dim=-2))",
        "rest = self.sum_(torch.cat([statistics.scatter, energy[..., None, :]], dim=-2))",
        SCALE,
    ),
    # --- factorisations
    Mutant("logdet-without-2", "linalg.py", "return 2 * self.L.diagonal", "return self.L.diagonal", E),
    Mutant("draws-by-L", "linalg.py", "(self.L.mT, E, upper=True)", "(self.L, E, upper=False)", P),
    Mutant(
        "eigenvalues-not-cut", "linalg.py", "values > resolution[..., None]", "values > 0 * resolution[..., None]", P
    ),
    Mutant("spectral-error-zero", "linalg.py", "return energy.sum(-1)", "return 0 * energy.sum(-1)", P),
    # --- features and scaling
    Mutant("last-activation-dropped", "features.py", "super().__init__(*layers)", "super().__init__(*layers[:-1])", F),
    Mutant("gain-ignored", "features.py", "gain=_gain(activation)", "gain=1.0", F),
    Mutant(
        "inputs-not-passed-on",
        "features.py",
        "torch.cat([phi, x.expand",
        "torch.cat([phi, 0 * x.expand",
        F,
    ),
    Mutant("scale-without-root", "scaling.py", ".sum(0).sqrt()", ".sum(0)", T),
    # --- statistics
    Mutant("moments-not-centred", "statistics.py", "rows = rows - centre[", "rows = rows - 0 * centre[", S),
    Mutant(
        "second-pass-dropped", "statistics.py", "return rows, centre, mean(rows)", "return rows, centre, 0 * centre", S
    ),
    Mutant("chan-without-between", "statistics.py", "+ other.scatter + between", "+ other.scatter", S),
    Mutant(
        "removal-wrong-share",
        "statistics.py",
        "(count * other.count / self.count)",
        "(self.count * other.count / count)",
        S,
    ),
    Mutant(
        "removal-forgets-energy",
        "statistics.py",
        "scale = rest.energy.clamp",
        "rest = replace(rest, energy=_diagonal(rest.scatter))\n        scale = rest.energy.clamp",
        S,
    ),
    Mutant(
        "addition-forgets-energy",
        "statistics.py",
        "+ other.scatter + between,\n            energy=self.energy + other.energy +",
        "+ other.scatter + between,\n            energy=self.energy + 0 *",
        S,
    ),
    # --- precision
    Mutant("m-for-n", "precision.py", 'm - 1 if bias_prior == "flat" else m', "m", E),
    Mutant("raw-moments-without-m", "precision.py", "@ rest + m[..., None, None] * raw", "@ rest + raw", S),
    Mutant("bias-variance-dropped", "precision.py", "return 1 / self.count", "return 0 / self.count", P),
    Mutant(
        "ridge-below-resolution",
        "precision.py",
        "(log_alpha), self.resolution)",
        "(log_alpha), 0 * self.resolution)",
        P,
    ),
    Mutant("misfit-without-penalty", "precision.py", "_least_squares_misfit + (B", "_least_squares_misfit + 0 * (B", E),
    Mutant("logdet-without-m", "precision.py", "self.equations.count.log()", "0 * self.equations.count.log()", E),
    Mutant(
        "noise-not-floored",
        "precision.py",
        "values.clamp_min(NOISE_FLOOR)",
        "values.clamp_min(0.0)",
        f"{E}::test_a_perfect_fit_is_held_up_by_the_noise_floor_and_said",
    ),
    Mutant("full-noise-uncorrelated", "precision.py", 'if noise == "diagonal":', "if noise:", E),
    Mutant("error-of-centring-zero", "precision.py", "centring = 2 * EPS", "centring = 0 * EPS", P),
    Mutant("error-of-weights-zero", "precision.py", "return ROUNDING * reach", "return 0 * reach", P),
    Mutant(
        "range-without-farthest",
        "precision.py",
        ".clamp_min(farthest)",
        "",
        f"{X}::test_targets_on_the_mean_ask_for_no_variance",
    ),
    # --- evidence
    Mutant("bias-penalised", "evidence.py", "penalised = W[..., : equations.n_penalised, :]", "penalised = W", E),
    Mutant("evidence-without-q", "evidence.py", "k * log_alpha + logdet_Lambda)", "k * log_alpha) + logdet_Lambda", E),
    Mutant("k-off-by-one", "evidence.py", "k, q, n = equations.n_penalised", "k, q, n = equations.n_penalised + 1", E),
    Mutant(
        "evidence-without-half", "evidence.py", "+ misfit) / (2 * equations.count)", "+ misfit) / equations.count", E
    ),
    Mutant("S-without-penalty", "evidence.py", "S = R.mT @ wR + precision", "S = R.mT @ wR + 0 * precision", E),
    Mutant("gradient-without-R", "evidence.py", "= part - pull[..., rows, :] @ N", "= part", E),
    Mutant("gradient-without-logdet", "evidence.py", "= part - pull", "= -pull", E),
    Mutant(
        "gradient-not-weighted", "evidence.py", "part = part * weight[0][..., rows, None]", "part = part.clone()", E
    ),
    Mutant(
        "gradient-of-first-rows",
        "evidence.py",
        "range(0, Phi.shape[-2], GRADIENT_ROWS)",
        "range(0, GRADIENT_ROWS, GRADIENT_ROWS)",
        E,
    ),
    Mutant(
        "slope-without-ridge",
        "evidence.py",
        "effective - precision.ridge * size",
        "effective - size",
        f"{E}::test_the_slope_in_alpha_is_the_derivative",
    ),
    # --- posterior
    Mutant("kron-swapped", "posterior.py", "(self.noise_cov, self.ratio_cov)", "(self.ratio_cov, self.noise_cov)", P),
    Mutant("joint-without-bias", "posterior.py", "H @ H.mT + self.equations.bias_variance", "H @ H.mT", P),
    Mutant("joint-at-own-alpha", "posterior.py", "H = precision.factor", "H = self.precision.factor", P),
    Mutant("forgetting-ignored", "posterior.py", "self.statistics.scaled(forgetting)", "self.statistics", P),
    # --- prediction and metrics
    Mutant(
        "mixture-without-spread", "prediction.py", "epistemic_var + np.square(spread)", "epistemic_var + 0 * spread", Y
    ),
    Mutant("interval-wrong-level", "prediction.py", "quantile((1 - level) / 2), ", "quantile(1 - level), ", Y),
    Mutant("correlation-det-halved", "prediction.py", "log_det + 2 * np.log", "log_det + np.log", Y),
    Mutant("lpd-scale-wrong-sign", "metrics.py", "float(mean + log_scale.sum())", "float(mean - log_scale.sum())", M),
    Mutant("coverage-one-sided", "metrics.py", "(y >= lower) & (y <= upper)", "y <= upper", M),
    Mutant("calibration-one-sided", "metrics.py", "np.abs(2 * pit - 1)", "np.abs(pit)", M),
    Mutant("crps-without-half", "metrics.py", "score - 0.5 * w[i]", "score - w[i]", M),
    # --- extrapolation
    Mutant(
        "programme-without-sum",
        COST,
        "X.new_ones(1, m), X.new_zeros(1, k)",
        "X.new_zeros(1, m), X.new_ones(1, k)",
        f"{X}::test_the_programme_keeps_its_constraints_and_no_feasible_point_costs_less",
    ),
    Mutant(
        "leave-one-out-wrong-sign",
        COST,
        "(1 - cost).clamp_min",
        "(1 + cost).clamp_min",
        f"{X}::test_leave_one_out_cost_is_the_cost_without_the_sample",
    ),
    Mutant("affine-hull-not-centred", HULLS, "(x - centre, X - centre, scale=X.norm())", "(x, X)", X),
    Mutant(
        "convex-hull-negative",
        HULLS,
        "_simplex_least_squares((part - centre) / size, (X - centre) / size, tol)",
        "nearest_in_affine_hull(part, X).coefficients",
        X,
    ),
    Mutant("distance-squared", HULLS, "(x - point).norm(dim=-1)", "(x - point).square().sum(-1)", X),
    Mutant(
        "tuning-wrong-mean",
        TUNING,
        "- posterior.mean(Phi))",
        "- posterior.equations.target_mean)",
        f"{X}::test_the_curve_is_the_validation_lpd",
    ),
    Mutant(
        "tuning-ignores-infinity",
        TUNING,
        "(float(curve[best]), math.inf)",
        "(float(curve[best]), float(log_alphas[best]))",
        f"{X}::test_an_optimum_at_infinity_is_found_and_said",
    ),
    Mutant(
        "tuning-forgets-its-own",
        TUNING,
        "max(refined, scanned, (before, log_alpha))",
        "max(refined, scanned)",
        f"{X}::test_an_alpha_below_the_curve_is_kept_if_it_is_best",
    ),
    # --- calibration
    Mutant("curve-without-power", CURVE, "log_b + log_power.exp() * self.log_ratio", "log_b + self.log_ratio", C),
    Mutant("curve-without-prior", CURVE, "loss = prior - (", "loss = 0 * prior - (", C),
    Mutant("tails-add-probability", CURVE, "for s in (-1, 1))", "for s in (1, 1))", C),
    Mutant(
        "precision-to-the-power-q",
        CURVE,
        "softmax(-SHARPNESS * log_var.mean(-1)",
        "softmax(-SHARPNESS * log_var.sum(-1)",
        C,
    ),
    Mutant("power-beyond-the-reach", CURVE, "np.minimum(ratio, self.reach)", "np.minimum(ratio, math.inf)", C),
    Mutant("failed-points-kept", POINTS, "fine &= self.weight", "fine |= self.weight", C),
    Mutant("noise-grows-beyond-the-data", "calibration/noise_head.py", ", self.low), self.high)", ", self.low), Z)", C),
    Mutant("held-rows-trained-on", SPLITS, "Split(np.setdiff1d(every, fold), ", "Split(every, ", C),
    Mutant(
        "member-forgets-its-fold",
        CROSSFIT,
        "replace(t.layer, posterior=more)",
        "t.layer",
        f"{CF}::test_a_members_last_layer_knows_every_row_at_the_alpha_and_noise_of_its_fold",
    ),
    Mutant(
        "points-not-in-order",
        CROSSFIT,
        'np.argsort(row, kind="stable")',
        "np.arange(len(row))",
        f"{CF}::test_held_out_points_of_several_partitions_meet_row_by_row",
    ),
    Mutant(
        "strengths-meet-in-one-column",
        CROSSFIT,
        "(t.job.strength, t.job.partition)",
        "(0.0, t.job.partition)",
        f"{CF}::test_a_mixture_has_members_of_every_strength_trained_as_one_batch",
    ),
    Mutant(
        "strength-of-the-lowest-lpd",
        CROSSFIT,
        "best = max(scores",
        "best = min(scores",
        f"{CF}::test_the_strength_of_the_largest_held_out_lpd_is_chosen_and_its_networks_are_kept",
    ),
    Mutant(
        "folds-seen-in-training",
        "fitting.py",
        "row[torch.from_numpy(job.split.train)] = 1",
        "row[:] = 1",
        f"{CF}::test_a_network_never_sees_the_rows_it_leaves_out",
    ),
    # --- members
    Mutant("energy-without-fan-in", "features.py", "W.shape[-2] * W.square()", "W.square()", N),
    Mutant("prior-share-of-all-rows", "training/stack.py", "strength / weight.sum(-1)", "strength / m", N),
    Mutant(
        "setback-for-all", "training/stack.py", "p[failed] = kept[failed]", "p.copy_(kept if failed.any() else p)", N
    ),
    *(
        Mutant(name, "model.py", old, new, f"{MODEL}::{test}")
        for name, old, new, test in (
            (
                "members-count-alike",
                "if self.calibration_ is None or c == 1:",
                "if True:",
                "test_the_prediction_is_the_mixture_of_its_members",
            ),
            (
                "weights-follow-the-tuned-alpha",
                "self._epistemic(marginals.cost)",
                "self._epistemic(marginals.ratio)",
                "test_tuning_moves_the_variance_alone_and_never_for_the_worse",
            ),
            (
                "tails-as-wide-as-the-rest",
                "(epistemic, 1.0, tails.factor)",
                "(epistemic, 1.0, 1.0)",
                "test_the_prediction_is_the_mixture_of_its_members",
            ),
            (
                "joint-without-stretch",
                "widening * shape / np.maximum(ratio, TINY)",
                "widening * np.ones_like(ratio)",
                "test_every_way_of_asking_gives_the_same_moments",
            ),
            (
                "one-curve-for-all-strengths",
                "self.calibration_.curves[self.members_[i].strength]",
                "self.calibration_.curve",
                "test_the_prediction_is_the_mixture_of_its_members",
            ),
            (
                "draws-without-spread",
                "* root * (means[i] - mean)",
                "* 0 * root",
                "test_draws_have_the_moments_of_the_joint_distribution",
            ),
            (
                "no-anchor",
                "mean, weights = self._means(marginals), self._weights(marginals)",
                "mean, weights = marginals.mean, self._weights(marginals)",
                "test_the_prediction_is_the_mixture_of_its_members",
            ),
            (
                "anchor-in-other-units",
                "self._anchor().precision / np.square(scale)",
                "self._anchor().precision",
                "test_the_prediction_is_the_mixture_of_its_members",
            ),
            (
                "joint-around-means-that-never-returned",
                "means, points, outputs = self._means(marginals), [], []",
                "means, points, outputs = marginals.mean, [], []",
                "test_every_way_of_asking_gives_the_same_moments",
            ),
        )
    ),
    Mutant("conformal-rank-of-n", "prediction.py", "round((n + 1) * level, 9)", "round(n * level, 9)", Y),
    # --- users' tables, and the model without torch
    Mutant("numbers-guarded", "tables/writing.py", "and not NUMBER.fullmatch(cell)", "and cell", TABLES),
    Mutant("carriage-return-kept", "tables/writing.py", 'replace("\\r", "\\n")', 'replace("\\r", "\\r")', TABLES),
    Mutant("filled-by-the-lowest", "tables/schema.py", "column.fill, values)", "column.low, values)", TABLES),
    Mutant("range-without-floor", "tables/schema.py", "(values < column.low) | (", "(values < -1e300) | (", TABLES),
    Mutant("numpy-weights-in-use", "export/numpy_bundle.py", "self._epistemic(cost)", "self._epistemic(ratio)", EXPORT),
    Mutant("numpy-anchor", "export/numpy_bundle.py", '1 + a["anchor_precision"] * var_star', "1.0", EXPORT),
    Mutant("numpy-thin-tails", "export/numpy_bundle.py", "factor * var", "var", EXPORT),
    Mutant("numpy-newton-half-way", "export/numpy_bundle.py", "1e-8 * narrowest", "1e-3 * narrowest", EXPORT),
    Mutant("alphas-not-together", "model.py", "log_alpha + each - float(np.mean(own))", "log_alpha", MODEL),
    # --- control
    Mutant("cov-without-spread", "integrations/casadi.py", "between.T if len(members) > 1 else 0", "between.T * 0", CA),
    Mutant("cost-at-star", "description.py", "else _spread(equations.spectral_at(log_alpha))", "else at_star", CA),
    Mutant("casadi-anchor", "integrations/casadi.py", "if self.described.anchored:", "if False:", CA),
    Mutant("casadi-alike", "integrations/casadi.py", "if not self.described.sharpness:", "if True:", CA),
    Mutant("rows-cross-borders", "dynamics/lags.py", "max(self.outputs, self.inputs) - 1", "self.inputs - 1", D),
    Mutant(
        "cross-forgotten", "dynamics/propagation.py", "between = F @ moments.cross", "between = 0 * moments.cross", D
    ),
    Mutant("no-stretch", "dynamics/samples.py", "+ stretch * deviation", "+ deviation", FIRST),
    Mutant("draws-without-anchor", "dynamics/samples.py", "if self.described.anchored:", "if False:", FIRST),
    # --- learning while running
    Mutant("root-without-C", "recursion.py", "_inverse(eye + C).mT", "_inverse(C).mT", RC),
    Mutant("gain-of-the-old-rows", "recursion.py", "times(half, E)", "E", RC),
    Mutant("weights-not-rooted", "recursion.py", "weight.sqrt()[:, None]", "weight[:, None]", RC),
    Mutant("bias-known", "recursion.py", "equations.bias_variance.sqrt()", "0 * equations.bias_variance", RC),
    Mutant("spectrum-never", "recursion.py", "SPECTRAL = 1e4", "SPECTRAL = 0.0", RC),
    Mutant("fades-too-slowly", "online/past.py", "math.exp(-n / self.memory)", "math.exp(-1 / self.memory)", FADES),
    Mutant("window-keeps-all", "online/model.py", "if gone and after", "if False and after", WINDOW),
    Mutant("digits-not-guarded", "online/layers.py", "SMALLEST_PIVOT = 1e-4", "SMALLEST_PIVOT = 0.0", LEVERAGE),
    Mutant("removal-unchecked", "statistics.py", "if bool(lowest < -1e-10", "if bool(lowest < -1e10", NEVER),
    Mutant("alpha-not-anew", "online/model.py", "self.model().reestimate()", "self.model()", ANEW),
    Mutant("tuned-alpha-lost", "model.py", "else own + (new - old)", "else new", TUNED),
    Mutant("bets-unfair", "online/drift.py", "- np.log(SCALES)", "", DRIFT),
    Mutant(
        "evidence-given-away",
        "online/drift.py",
        "np.logaddexp(self._log_M, 0.0)",
        "np.logaddexp(self._log_M, 4.0)",
        DRIFT,
    ),
    Mutant("ranks-without-own", "online/drift.py", "chance * ties) / len(before)", "0.5 * ties) / len(before)", DRIFT),
    Mutant(
        "evidence-doubled",
        "online/drift.py",
        "np.exp(self._log_M - top).mean()",
        "np.exp(self._log_M - top).sum()",
        DRIFT,
    ),
    # --- Bayesian optimisation
    Mutant(
        "botorch-without-stretch",
        GAUSSIAN,
        "self.curve.shape(ratio) / ratio.clamp_min(TINY)",
        "ratio / ratio.clamp_min(TINY)",
        f"{BT}::test_the_posterior_is_the_models_joint",
    ),
    Mutant(
        "botorch-without-spread",
        GAUSSIAN,
        "* (means - mean)).movedim",
        "* 0 * (means - mean)).movedim",
        f"{BT}::test_the_posterior_is_the_models_joint",
    ),
    Mutant(
        "conditioned-by-the-old-root",
        GAUSSIAN,
        "torch.linalg.cholesky(eye + B.mT @ B)",
        "torch.linalg.cholesky(eye + 2 * B.mT @ B)",
        f"{BT}::test_conditioning_is_the_update_of_the_last_layer",
    ),
    Mutant(
        "conditioned-again-from-zero",
        GAUSSIAN,
        "residual - self.M @ rows.H.mT",
        "residual",
        f"{BT}::test_conditioning_is_the_update_of_the_last_layer",
    ),
    Mutant(
        "drawn-around-zero",
        GAUSSIAN,
        "return self.M + (self.R",
        "return 0 * self.M + (self.R",
        f"{BT}::test_drawn_functions_have_the_moments_of_the_posterior",
    ),
    Mutant(
        "bias-without-its-determinant",
        SURROGATE,
        "C.logdet() + weight.log()",
        "C.logdet()",
        f"{BT}::test_evidence_by_rows_is_the_evidence",
    ),
    Mutant(
        "box-of-the-points",
        SURROGATE,
        "X.amax(0)]) if bounds is None else",
        "X.amax(0)]) if True else",
        f"{BT}::test_lengths_do_not_change_where_points_gather",
    ),
    Mutant("regret-of-the-last", "studies/bo/problems.py", "Y[:, 0].cummax(0).values", "Y[:, 0]", BO),
    Mutant("back-off-by-mean", "integrations/do_mpc.py", "ndtri(probability)", "(probability - 0.5)", BACK_OFF),
    Mutant("module-members-spread", "module.py", "+ between", "+ 0 * between", MODULE),
    Mutant("module-tails", "module.py", "noise_var = self.widening * (", "noise_var = (", MODULE),
    Mutant("module-sharpness", "module.py", "softmax(-self.sharpness", "softmax(self.sharpness", MODULE),
    Mutant("module-weights-at-star", "module.py", "noise + at_star, epistemic", "noise + epistemic, epistemic", MODULE),
    Mutant("module-anchor", "module.py", "if self.anchored:", "if False:", MODULE),
    Mutant("module-reach", "module.py", "known.pow(self.power) * (ratio / known)", "known.pow(self.power)", BEYOND),
    Mutant("module-shift", "module.py", "phi @ self.root + self.shift", "phi @ self.root", MODULE),
    Mutant(
        "targets-scaled-later",
        "statistics.py",
        "energy=self.energy * unit.square()",
        "energy=self.energy * unit",
        SCALED,
    ),
    Mutant("attach-units", "attaching.py", "raw.with_targets(targets)", "raw", BY_HAND),
    Mutant("attach-shares", "attaching.py", "ranks.reduce(Statistics", "(Statistics", TWO),
    Mutant("loss-of-processes", "training/loss.py", "carrier = layer.ranks.world * (", "carrier = (", TWO),
    Mutant("loss-value", "training/loss.py", "offset + layer.ranks.world * rows.loss", "offset + rows.loss", TWO),
    Mutant(
        "loss-gradient",
        "training/loss.py",
        "return value + carrier - carrier.detach()",
        "return value + carrier",
        FIRST_LOSS,
    ),
    Mutant("kernel-variance", "integrations/gpytorch.py", "alpha * _noise_var", "_noise_var", "test_gpytorch.py"),
    Mutant("kernel-bias", "integrations/gpytorch.py", "over_alpha.sqrt() if", "over_alpha if", "test_gpytorch.py"),
]


def run_tests(package: Path, tests: list[str]) -> tuple[bool, str]:
    """Whether the tests pass on a copy of src/ and tests/, and what pytest printed."""
    variables = {"PYTHONPATH": str(package / "src"), "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "250"}  # kept bytecode saves time, wide lines the reason
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)]
    try:
        done = subprocess.run(
            command, cwd=package, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {LIMIT_S} s"
    if f"package: {package / 'src' / 'lastlayer'}{os.sep}" not in done.stdout:
        return False, f"not the copy in {package} was tested:\n{indent(done.stdout + done.stderr, '    ')}"
    return done.returncode == 0, done.stdout


def verdict(mutant: Mutant, original: Path, place: Path) -> tuple[bool, str]:
    """Whether the mutant is caught, and by which test."""
    text = (original / "src/lastlayer" / mutant.file).read_text()
    if (found := text.count(mutant.old)) != 1:
        return False, f"STALE: its old text occurs {found} times in {mutant.file}"
    copy = place / mutant.name
    shutil.copytree(original, copy)
    file = copy / "src/lastlayer" / mutant.file
    file.write_text(text.replace(mutant.old, mutant.new))
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):  # written by the first run, kept to save time
        compiled.unlink()
    passed, output = run_tests(copy, [mutant.test])
    shutil.rmtree(copy)
    if passed:
        return False, f"SURVIVED {mutant.test}"
    failed = re.search(r"^FAILED tests/(\S+)( - [\w.]+)?", output, re.MULTILINE)
    if failed is None:
        return False, f"BROKEN: no test failed, but {output}"
    return True, f"caught by {failed[1]}{failed[2] or ''}"


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"no such mutant: {', '.join(sorted(unknown))}; there are {', '.join(m.name for m in MUTANTS)}")
        return 1
    every = {mutant.test for mutant in chosen}
    needed = sorted(test for test in every if "::" not in test or test.split("::")[0] not in every)
    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder).resolve() / "original"
        for part in ("src", "tests", "examples"):
            shutil.copytree(ROOT / part, original / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", original)
        (original / "conftest.py").write_text(CONFTEST)
        start = time.perf_counter()
        passed, output = run_tests(original, needed)
        print(
            f"{'(the formulas as they are)':32} {time.perf_counter() - start:5.1f} s  {'pass' if passed else 'FAIL'}",
            flush=True,
        )
        if not passed:
            print(f"{output}\n0 passed, {len(chosen)} failed")
            return 1
        caught = 0
        for mutant in chosen:
            start = time.perf_counter()
            good, words = verdict(mutant, original, original.parent)
            caught += good
            print(f"{mutant.name:32} {time.perf_counter() - start:5.1f} s  {words}", flush=True)
    print(f"{caught} passed, {len(chosen) - caught} failed")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
