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
    """Relative to src/lastlayer, or benchmarks/..."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """The test file, or the one test in it, that should notice."""

    @property
    def path(self) -> str:
        """Of the file, from the repository root."""
        return self.file if self.file.startswith("benchmarks/") else f"src/lastlayer/{self.file}"


E, P, S, X = "test_evidence.py", "test_posterior.py", "test_statistics.py", "test_extrapolation.py"
F, Y, M, R = "test_features.py", "test_prediction.py", "test_metrics.py", "test_regressor.py"
T, C, CF = "test_training.py", "test_calibration.py", "test_crossfit.py"
CA, D, FM, SETTINGS = "test_casadi.py", "test_dynamics.py", "test_formula.py", "test_settings.py"
LAGGED = f"{D}::test_lags_carry_their_covariances"
FIRST = f"{D}::test_the_first_step_of_sampled_weights_is_the_prediction"
BACK_OFF = "test_do_mpc.py::test_the_back_off_is_the_quantile_times_the_propagated_standard_deviation"
N, MODEL = "test_members.py", "test_model.py"
LENGTHS, COPIES, WAVES = "training/lengths.py", "ensemble/copies.py", "networks/fourier.py"
DIFFERENCES, CONTRASTS, LENGTH_WEIGHTS, PROCESS, NOISE_PRIOR = (
    f"test_lengths.py::test_{name}"
    for name in (
        "slopes_are_those_of_differences",
        "the_value_is_that_of_contrasts_up_to_a_constant",
        "weights_count_copies_and_zero_counts_nothing",
        "fourier_features_are_the_process",
        "the_noise_under_its_prior_is_that_of_the_largest_product",
    )
)
TABLES, EXPORT, ASKED = "test_tables.py", "test_export.py", "test_predict.py"
CELLS, LOG = "test_cells.py", "test_log_prediction.py"
STACK, CROSSED = "test_stack.py", "test_crossfit.py"
SCALE, BOUND, RUNNING = "test_scale.py", "training/bound.py", "training/running_posterior.py"
ENGINE, PROBLEMS = "training/engine.py", "training/problems.py"
SEEN = f"{SCALE}::test_weights_are_those_of_the_rows_that_were_seen"
RC, DRIFT = "test_recursion.py", "test_drift.py"
HOSTILE = "test_online.py::test_hostile_rows_leave_a_window_without_a_trace"
HUGE = "test_online.py::test_rows_of_huge_leverage_come_as_in_a_refit"
REMOVED = "test_online.py::test_hostile_rows_are_removed_to_four_digits_or_refused"
FADES, WINDOW, ANEW, NEVER, LEVERAGE, TUNED = (
    f"test_online.py::test_{name}"
    for name in (
        "forgetting_is_a_refit_with_weights_and_the_prior_does_not_fade",
        "a_window_is_a_refit_on_its_rows_after_many_steps",
        "alpha_and_noise_anew_are_those_of_the_last_layer_of_all_rows",
        "rows_that_were_never_in_are_refused_and_nothing_happens",
        "rows_of_high_leverage_leave_a_window_by_a_factorisation",
        "a_tuned_alpha_is_followed_and_keeps_its_distance",
    )
)
KEPT_DIGITS = "test_online.py::test_ten_thousand_rows_one_by_one_are_a_refit_to_nine_digits"
SAVED = "test_online_files.py::test_the_loaded_model_goes_on_as_the_saved_one_does"
POSTHOC, MODULE = "test_posthoc.py", "test_module.py::test_it_says_what_predictive_says"
SCALED = f"{POSTHOC}::test_statistics_of_scaled_targets_follow_from_those_of_raw_ones"
BY_HAND = f"{POSTHOC}::test_it_is_the_posterior_of_the_features_written_down_by_hand"
TWO = f"{POSTHOC}::test_two_processes_give_the_answer_of_one"
ATTACHED = "estimators/attached.py"
EVERY_TOKEN = "test_attached.py::test_every_token_is_a_row_and_padding_is_none"
CONVOLUTION = "test_attached.py::test_a_convolution_of_size_1_is_a_linear_layer_at_every_position"
FIRST_LOSS = f"{POSTHOC}::test_the_first_batch_of_all_rows_gives_the_evidence_and_its_gradient"
BT, BO = "test_botorch.py", "test_bo_study.py"
GAUSSIAN, SURROGATE = (f"integrations/botorch/{name}.py" for name in ("gaussian", "surrogate"))
FIT, LIKELIHOOD, POINTS = (f"calibration/{name}.py" for name in ("fit", "likelihood", "points"))
SLOW, PIECES, LONG, PART = (
    f"{C}::test_value_and_gradient_are_those_of_the_slow_form",
    f"{C}::test_the_gradient_is_that_of_differences_and_pieces_add_up",
    f"{C}::test_the_long_way_ends_no_lower",
    f"{C}::test_a_part_of_the_points_is_always_the_same_and_weighs_as_much",
)
BATCH = f"{E}::test_a_batch_of_models_is_each_of_them_alone_and_the_slow_search"
SPLITS, CROSSFIT, TRAINER = (f"ensemble/{name}.py" for name in ("splits", "crossfit", "trainer"))
FITTED, PREDICTOR, REVISIONS = (f"predictor/{name}.py" for name in ("fitted", "module", "revisions"))
FORMULA, MLP, BINNED = "formula.py", "networks/mlp.py", "networks/encoding.py"
BINS = "test_encoding.py::test_bins_are_those_of_the_slow_form"
GIVEN = f"{CF}::test_of_splits_that_were_given_those_rows_lie_outside_that_cost_more_than_any_left_out_alone"
FAR, SHELL, SHELLS = (
    f"{CF}::test_{name}"
    for name in (
        "points_know_how_far_outside_the_data_the_process_sees_them",
        "a_shell_is_what_lies_farthest_from_the_middle",
        "rows_that_several_shells_hold_out_are_points_of_each",
    )
)
MIXTURE, MOMENTS, OWN, HAND, FACES = (
    f"{MODEL}::test_the_prediction_is_the_mixture_of_its_members",
    f"{MODEL}::test_every_way_of_asking_gives_the_same_moments",
    f"{MODEL}::test_what_is_done_to_a_network_or_module_does_not_reach_the_model",
    f"{FM}::test_the_formula_by_hand",
    f"{FM}::test_three_array_libraries_say_what_the_model_says",
)
COST = HULLS = TUNING = "extrapolation.py"
B, VARIATIONAL = "test_baselines.py", "baselines.py"
UNSEEN = f"{R}::test_the_rank_is_among_rows_that_the_last_layer_has_not_seen"

OBSERVED, PATTERNS = "test_observe.py", "test_patterns.py"

MUTANTS = [
    Mutant(
        "weights of a batch as if all rows had been seen",
        BOUND,
        "mean = equations.at(log_alpha + math.log(seen))",
        "mean = equations.at(log_alpha)",
        SEEN,
    ),
    Mutant(
        "reach of an average by shares instead of their squares",
        RUNNING,
        "effective_rows = 1 / ((1 - share) ** 2 / self.snapshot.effective_rows + share**2 / used)",
        "effective_rows = 1 / ((1 - share) / self.snapshot.effective_rows + share / used)",
        SEEN,
    ),
    Mutant(
        "after a pass over all rows a batch counts as if there had been none",
        RUNNING,
        "share, used / (used + self.snapshot.effective_rows)",
        "share, 1 / (self.steps + 1)",
        f"{SCALE}::test_after_a_refresh_a_batch_counts_as_the_rows_it_has",
    ),
    Mutant(
        "share of a batch by the drift instead of its root",
        RUNNING,
        "MOST_SHARE) * drift**0.5",
        "MOST_SHARE) * drift",
        f"{SCALE}::test_the_share_of_a_batch_goes_with_the_root_of_the_drift",
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
        PROBLEMS,
        "if left == self.refresh:",
        "if left == self.refresh - 1:",
        f"{SCALE}::test_passes_over_all_rows_come_when_they_are_due",
    ),
    Mutant(
        "the log-determinant's part of the loss for one output whatever their number",
        BOUND,
        "each = z @ self.inverse, share[..., :n] * (q * logdet_scale)",
        "each = z @ self.inverse, share[..., :n] * logdet_scale",
        SCALE,
    ),
    Mutant(
        "rows of the log-determinant that stand for themselves alone",
        BOUND,
        "(q * logdet_scale)",
        "float(q)",
        f"{SCALE}::test_the_log_determinant_on_some_rows_is_unbiased",
    ),
    Mutant(
        "a bound without the distance of the centres",
        BOUND,
        "gram = gram + count * away[..., :, None] * away[..., None, :]",
        "gram = gram + 0 * away[..., :, None] * away[..., None, :]",
        f"{SCALE}::test_the_bound_is_never_below_the_evidence",
    ),
    Mutant(
        "the gradient of rows as one product about another centre",
        BOUND,
        "offset = (x @ W + b - y) @ pull + away @ inverse",
        "offset = (x @ W + b - y) @ pull",
        f"{STACK}::test_the_gradient_of_rows_is_one_product",
    ),
    Mutant(
        "moments of a stack without what is left of the mean",
        "training/stack.py",
        "M[:, :-1, -1:], rest[:, None], alpha=-1)",
        "M[:, :-1, -1:], rest[:, None], alpha=0)",
        f"{STACK}::test_value_and_gradient_are_those_of_autograd",
    ),
    Mutant(
        "a gradient that forgets the weight of a row",
        "training/stack.py",
        "            g *= self.root\n",
        "            g *= 1.0\n",
        f"{STACK}::test_value_and_gradient_are_those_of_autograd",
    ),
    Mutant(
        "padding that counts",
        TRAINER,
        "used = torch.stack([torch.arange(longest) < len(part) for part in parts])",
        "used = torch.stack([torch.arange(longest) >= 0 for part in parts])",
        f"{CROSSED}::test_as_one_batch_or_one_by_one_the_networks_are_the_same",
    ),
    Mutant(
        "statistics of processes added without what lies between their means",
        "distributed.py",
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
    Mutant("last-activation-dropped", MLP, "super().__init__(*layers)", "super().__init__(*layers[:-1])", F),
    Mutant("gain-ignored", MLP, "gain=gain,", "gain=1.0,", F),
    Mutant("inputs-not-passed-on", MLP, "torch.cat([phi, passed.expand", "torch.cat([phi, 0 * passed.expand", F),
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
    Mutant("m-for-n", "precision.py", 'statistics.n - 1 if bias_prior == "flat" else', "statistics.n if True else", E),
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
        "evidence-without-half",
        "evidence.py",
        "misfit) / (2 * equations.n_targets)",
        "misfit) / equations.n_targets",
        E,
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
    Mutant("plateau-at-its-far-end", "evidence.py", "torch.where(plateau, near, best)", "best", BATCH),
    Mutant("alpha-of-the-scan", "evidence.py", "running, n_steps = ~(zero", "running, n_steps = zero & (zero", BATCH),
    Mutant("only-fixed-points", "evidence.py", "/ (gap - gap_before) if step else gap", "* 0 + gap", BATCH),
    Mutant(
        "one-range-for-all-models", "precision.py", "self.spectrum.values.amax(-1)", "self.spectrum.values.max()", BATCH
    ),
    Mutant(
        "layers-in-another-order",
        "training/last_layer.py",
        "[layers[i] for i in range(len(models))]",
        "list(layers.values())",
        f"{E}::test_last_layers_of_models_of_any_shape_come_in_their_order",
    ),
    # --- posterior
    Mutant("kron-swapped", "posterior.py", "(self.noise_cov, self.ratio_cov)", "(self.ratio_cov, self.noise_cov)", P),
    Mutant("joint-without-bias", "posterior.py", "H @ H.mT + self.equations.bias_variance, ", "H @ H.mT, ", P),
    Mutant(
        "joint-at-own-alpha", "posterior.py", "H = precision.factor.whiten(z)", "H = self.precision.factor.whiten(z)", P
    ),
    Mutant("forgetting-ignored", "posterior.py", "self.statistics.scaled(forgetting)", "self.statistics", P),
    # --- prediction and metrics
    Mutant(
        "mixture-without-spread", "prediction.py", "epistemic_var + np.square(spread)", "epistemic_var + 0 * spread", Y
    ),
    Mutant("merged-outputs-apart", "prediction.py", "cov = cov + share[..., None] *", "cov = cov + 0 *", Y),
    Mutant("merged-functions-lost", "prediction.py", "function_correlation=functions,\n", "\n", Y),
    Mutant("interval-wrong-level", "prediction.py", "quantile((1 - level) / 2), ", "quantile(1 - level), ", Y),
    Mutant("correlation-det-halved", "prediction.py", "log_det + 2 * np.log", "log_det + np.log", Y),
    Mutant("lpd-scale-wrong-sign", "metrics.py", "float(mean + log_scale.sum())", "float(mean - log_scale.sum())", M),
    Mutant("coverage-one-sided", "metrics.py", "(y >= lower) & (y <= upper)", "y <= upper", M),
    Mutant(
        "calibration-one-sided", "metrics.py", "np.abs(2 * prediction.with_output", "np.abs(prediction.with_output", M
    ),
    Mutant("interval-score-half-penalty", "metrics.py", "2 / (1 - level) *", "1 / (1 - level) *", "test_scorers.py"),
    Mutant("one-output-keeps-its-axis", "shapes.py", "if y_ndim == 1 else", "if y_ndim == 0 else", "test_shapes.py"),
    Mutant("targets-broadcast", "shapes.py", "not (q == 1 and", "not (q >= 1 and", "test_shapes.py"),
    Mutant("crps-without-half", "metrics.py", "score - 0.5 * w[i]", "score - w[i]", M),
    Mutant(
        "crps-of-wide-log-normals-by-their-means",
        "metrics.py",
        "log_ndtr((mu2 - mu1 - v1) / s)",
        "0.0",
        "test_log_prediction.py",
    ),
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
    Mutant(
        "leave-one-out-leaves-none-out",
        COST,
        "return cost / (1 - cost).clamp_min(torch.finfo(cost.dtype).eps)",
        "return cost",
        UNSEEN,
    ),
    Mutant("rank-among-rows-seen", FITTED, "left_out = leave_one_out_cost(cost)", "left_out = cost", UNSEEN),
    Mutant(
        "blocks-in-raw-units",
        "extrapolation.py",
        "(X - X.mean(0)) / np.where(scale > 0, scale, 1.0)",
        "X - X.mean(0)",
        f"{X}::test_blocks_do_not_depend_on_the_units_of_columns",
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
    Mutant(
        "tuning-folds-count-alike",
        TUNING,
        "share = np.array([len(fold.T) for fold in folds]) / sum(len(fold.T) for fold in folds)",
        "share = np.full(len(folds), 1 / len(folds))",
        f"{X}::test_on_folds_of_any_size_every_point_counts_the_same",
    ),
    # --- lengths and the prior of the noise
    Mutant("lengths-without-the-linear-part", LENGTHS, "- (by_smooth + rho * G) @ a", "- by_smooth @ a", DIFFERENCES),
    Mutant(
        "slope-by-rho-of-the-whole",
        LENGTHS,
        "by_linear = (G * linear)",
        "by_linear = (G * (smooth + linear))",
        DIFFERENCES,
    ),
    Mutant(
        "linear-part-in-full", LENGTHS, "linear = log_linear.exp()[:, None, None] * inner", "linear = inner", CONTRASTS
    ),
    Mutant("lengths-have-nothing-in-common", LENGTHS, "COMMON / (1 + COMMON * away.shape[-1]) *", "0 *", CONTRASTS),
    Mutant("common-part-of-one-input", LENGTHS, "(1 + COMMON * away.shape[-1])", "(1 + COMMON)", CONTRASTS),
    Mutant("slopes-without-the-common-part", LENGTHS, "    away = _uncommon(away)\n", "", DIFFERENCES),
    Mutant(
        "rho-without-its-prior",
        LENGTHS,
        "+ ((log_linear - LOG_LINEAR) / LOG_LINEAR_STD).square()",
        "+ 0 * log_linear",
        CONTRASTS,
    ),
    Mutant(
        "lengths-know-the-bias",
        LENGTHS,
        "one[:, :, None] * one[:, None] / ones",
        "0 * one[:, :, None] / ones",
        CONTRASTS,
    ),
    Mutant(
        "lengths-without-their-prior",
        LENGTHS,
        "lengths = (away * _uncommon(away)).sum(-1)",
        "lengths = 0 * away.sum(-1)",
        CONTRASTS,
    ),
    Mutant(
        "rows-of-no-weight-count", LENGTHS, "root = weight.sqrt()", "root = torch.ones_like(weight)", LENGTH_WEIGHTS
    ),
    Mutant("cosines-are-sines", WAVES, "= 0.5 * math.pi", "= 0.0", PROCESS),
    Mutant("linear-features-without-their-root", WAVES, "(0.5 * (log_linear +", "(1.0 * (log_linear +", PROCESS),
    Mutant("linear-features-of-one-frequency", WAVES, "+ math.log(n))", ")", PROCESS),
    Mutant("uniform-frequencies", WAVES, "torch.special.ndtri(uniform", "(uniform", PROCESS),
    Mutant(
        "frequencies-of-one-length",
        WAVES,
        "torch.linalg.qr(normal()).Q * normal().norm(dim=0)",
        "torch.linalg.qr(normal()).Q",
        PROCESS,
    ),
    Mutant("noise-prior-without-rows", "precision.py", "+ prior_rows) *", "+ 0 * prior_rows) *", NOISE_PRIOR),
    Mutant("noise-prior-not-in-the-evidence", "evidence.py", " + prior.rows * E.logdet()", "", NOISE_PRIOR),
    # --- copies, and rows that members have not seen
    Mutant(
        "copies-lose-weight",
        COPIES,
        "np.bincount(place[order], count[order])",
        "np.ones(first.sum())",
        "test_copies.py",
    ),
    Mutant("no-row-is-near", COPIES, "NEAR * apart", "0 * apart", "test_copies.py"),
    Mutant(
        "unseen-rows-are-removed",
        "predictor/unseen.py",
        "weight[row] -= taken",
        "weight[row] -= 0 * taken",
        "test_unseen.py",
    ),
    Mutant("unseen-rows-do-not-fade", "predictor/unseen.py", "factor * self.weight", "self.weight", "test_unseen.py"),
    # --- calibration
    Mutant("slopes-without-trust", LIKELIHOOD, "by_weight.sum(1)[:, None]", "0 * by_weight.sum(1)[:, None]", SLOW),
    Mutant("curves-not-widened", FIT, "math.log((n + UNKNOWN) / (n - UNKNOWN - 2))", "0.0", C),
    Mutant("families-are-trusted-alike", "formula.py", "(log_trust - sharpness", "(0 * log_trust - sharpness", MIXTURE),
    Mutant("curve-without-prior", FIT, "0.5 * float(away @ away), away / self.width", "0.0, 0 * away", SLOW),
    Mutant(
        "curves-end-at-the-start",
        FIT,
        "p.best([p.lowest([p.start(*start) for start in STARTS])])",
        "p.lowest([p.start(*start) for start in STARTS])",
        LONG,
    ),
    Mutant("tails-add-probability", LIKELIHOOD, " - ops.logaddexp(0.0, share)", "", SLOW),
    Mutant("correlation-ignored-in-curves", LIKELIHOOD, "shape[-1], self.correlation", "shape[-1], None", SLOW),
    Mutant("slopes-without-weights", LIKELIHOOD, "(self.sharpness / q * by_weight)", "(0 * by_weight)", SLOW),
    Mutant(
        "slopes-without-shrinkage",
        LIKELIHOOD,
        "by_own, by_noise = by_shrinkage * own_part",
        "by_own, by_noise = 0 * own_part",
        SLOW,
    ),
    Mutant("slopes-without-tails", LIKELIHOOD, "(1 - less * tail)[", "(1 - 0 * tail)[", SLOW),
    Mutant("slopes-of-a-known-share", LIKELIHOOD, "in_tails.sum() - rho.sum() *", "in_tails.sum() - 0 *", SLOW),
    Mutant("slopes-without-logdet", LIKELIHOOD, "ops.outer(pull, pull) - inverse)", "ops.outer(pull, pull))", SLOW),
    Mutant("process-in-other-units", LIKELIHOOD, "+ self.log_fraction - per_variance", "+ self.log_fraction", SLOW),
    Mutant("process-in-full-for-itself", LIKELIHOOD, "log_outside + self.log_fraction", "log_outside", SLOW),
    Mutant(
        "slopes-without-the-process", LIKELIHOOD, "by_shrinkage.sum(), by_far.sum()", "by_shrinkage.sum(), 0.0", SLOW
    ),
    Mutant("slope-of-b-with-the-process", LIKELIHOOD, ".sum(1) - by_far / q", ".sum(1)", SLOW),
    Mutant(
        "slope-of-gamma-with-the-process", LIKELIHOOD, "((by_inside + by_own) *", "((by_epistemic + by_own) *", SLOW
    ),
    Mutant(
        "inside-by-the-mean-cost",
        POINTS,
        "cost[single if single.any() else finite].max()",
        "cost[single if single.any() else finite].mean()",
        FAR,
    ),
    Mutant("no-additive-reference", FIT, "points.inside.get(ADDITIVE)", "None", SLOW),
    Mutant(
        "additive-reference-judged-as-the-process",
        "calibration/curve.py",
        "process | {ADDITIVE: self.additive_inside}",
        "process | {ADDITIVE: process.get(FOURIER, self.additive_inside)}",
        HAND,
    ),
    Mutant("inside-by-whole-regions", POINTS, "cost[single if single.any() else finite]", "cost[finite]", FAR),
    Mutant("slopes-of-one-piece", FIT, "slope = slope - np.concatenate", "slope = 0 * slope - np.concatenate", PIECES),
    Mutant("part-without-the-rest's-weight", POINTS, "weight[rows].sum() / weight[part].sum()", "1.0", PART),
    Mutant("first-part-of-the-points", POINTS, "rng.permutation(rows)[:most]", "rows[:most]", PART),
    Mutant(
        "lpd-before-by-precision",
        FIT,
        "mixture=False, sharpness=0.0)",
        "mixture=False)",
        f"{MODEL}::test_the_lpd_before_is_that_of_the_uncalibrated_mixture_whose_families_count_alike",
    ),
    Mutant(
        "blocks-count-in-full",
        POINTS,
        "(REGION_WEIGHT if kind in REGIONS else 1.0)",
        "1.0",
        f"{CF}::test_held_out_points_of_several_partitions_meet_row_by_row",
    ),
    Mutant("shells-count-in-full", POINTS, '("blocked", "shell", "outside")', '("blocked", "outside")', SHELLS),
    Mutant(
        "failed-points-kept",
        POINTS,
        "(fine & (self.weight > 0))",
        "(fine | (self.weight > 0))",
        f"{C}::test_points_of_a_network_that_failed_are_left_out",
    ),
    Mutant(
        "held-rows-trained-on",
        SPLITS,
        "Split(np.flatnonzero(~rows), ",
        "Split(np.arange(len(rows)), ",
        f"{C}::test_every_row_is_held_out_once_and_trained_on_otherwise",
    ),
    Mutant(
        "member-forgets-its-fold",
        CROSSFIT,
        "layer=replace(fit.layer, posterior=more)",
        "layer=fit.layer",
        f"{CF}::test_of_many_rows_a_members_last_layer_knows_all_at_the_alpha_and_noise_of_its_fold",
    ),
    Mutant(
        "points-not-in-order",
        CROSSFIT,
        'np.argsort(np.concatenate([fit.task.split.held for fit in partition]), kind="stable")',
        "np.arange(sum(len(fit.task.split.held) for fit in partition))",
        f"{CF}::test_held_out_points_of_several_partitions_meet_row_by_row",
    ),
    Mutant(
        "priors-meet-in-one-column",
        CROSSFIT,
        "(fit.task.family, fit.task.partition)",
        "(FOURIER, fit.task.partition)",
        f"{CF}::test_a_mixture_has_members_of_every_family_and_its_networks_are_trained_as_one_batch",
    ),
    Mutant(
        "prior-of-the-lowest-lpd",
        CROSSFIT,
        "best = max(scores",
        "best = min(scores",
        f"{CF}::test_the_prior_precision_of_the_largest_held_out_lpd_is_chosen_and_its_networks_are_kept",
    ),
    Mutant(
        "folds-seen-in-training",
        TRAINER,
        "row[torch.from_numpy(task.split.train)] = 1",
        "row[:] = 1",
        f"{CF}::test_a_network_never_sees_the_rows_it_leaves_out",
    ),
    Mutant(
        "one-process-per-fold",
        CROSSFIT,
        " and not (whole and f.task.family == FOURIER)]",
        "]",
        f"{CF}::test_the_process_is_one_member_of_every_row",
    ),
    Mutant("shell-around-the-middle", "extrapolation.py", "np.argsort((_standard", "np.argsort(-(_standard", SHELL),
    Mutant(
        "shell-in-raw-units",
        "extrapolation.py",
        "Z: ndarray = (X - X.mean(0)) / np.where(scale > 0, scale, 1.0)",
        "Z: ndarray = X - X.mean(0)",
        SHELL,
    ),
    Mutant(
        "shell-of-single-rows", "extrapolation.py", "order[max(2, round(share * len(order))) :]", "order[-1:]", SHELL
    ),
    Mutant("given-regions-count-in-full", POINTS, "REGION_WEIGHT * weight, weight)", "weight, weight)", GIVEN),
    Mutant("given-regions-count-as-single", POINTS, 'np.where(beyond, "outside", kind)', "kind", GIVEN),
    Mutant("inside-with-the-row-itself", CROSSFIT, "leave_one_out_cost(weight * cost)", "(weight * cost)", GIVEN),
    Mutant(
        "inside-without-weights",
        CROSSFIT,
        "leave_one_out_cost(weight * cost) / weight",
        "leave_one_out_cost(cost)",
        GIVEN,
    ),
    # --- encoded inputs
    Mutant("bins-begin-at-their-end", BINNED, "-knots[:-1] * slope", "-knots[1:] * slope", BINS),
    Mutant(
        "bins-of-equal-width",
        BINNED,
        "knots = z[:MOST_ROWS].quantile(torch",
        "knots = z.min() + (z.max() - z.min()) * (torch",
        BINS,
    ),
    Mutant(
        "bins-without-width-are-steps",
        BINNED,
        "torch.where(width > NO_WIDTH, 1 / width.clamp_min(NO_WIDTH), 0.0)",
        "1 / width.clamp_min(NO_WIDTH)",
        BINS,
    ),
    Mutant(
        "bins-of-the-first-network",
        BINNED,
        "getattr(encoding, name) for encoding",
        "getattr(encodings[0], name) for encoding",
        "test_encoding.py::test_a_stack_of_encodings_is_each_of_them_alone",
    ),
    Mutant(
        "as-many-bins-as-values",
        BINNED,
        "len(z.unique()) - 1",
        "len(z.unique())",
        "test_encoding.py::test_how_many_bins_an_input_has",
    ),
    Mutant(
        "bins-of-rows-left-out",
        TRAINER,
        "PiecewiseEncoding.of(self.data.X[rows],",
        "PiecewiseEncoding.of(self.data.X,",
        f"{CF}::test_lengths_and_bins_never_see_the_rows_left_out",
    ),
    Mutant(
        "inputs-passed-on-in-full",
        "networks/architecture.py",
        "torch.full((n_inputs,), ENCODED_SKIP)",
        "torch.ones(n_inputs)",
        "test_encoding.py::test_inputs_are_passed_on_scaled_down",
    ),
    Mutant(
        "inputs-passed-on-in-full-in-training",
        "training/stack.py",
        "passed = X if self.scale is None else X * self.scale",
        "passed = X",
        "test_encoding.py::test_a_pass_has_the_statistics_of_the_plain_forward",
    ),
    Mutant(
        "groups-without-their-bins",
        MLP,
        "whole = Encoded(PiecewiseEncoding.stacked(encodings), whole)",
        "whole = Encoded(encodings[0], whole)",
        "test_encoding.py::test_a_stack_of_encoded_networks_is_each_of_them_alone",
    ),
    # --- members
    Mutant("energy-without-fan-in", MLP, "W.shape[-2] * W.square()", "W.square()", N),
    Mutant(
        "prior-share-of-all-rows",
        PROBLEMS,
        "precision / process_group.sum_(count.double())",
        "precision / len(data.X)",
        N,
    ),
    Mutant("one-activation-for-all", TRAINER, "tasks[0].family.activation or s.activation", "s.activation", SETTINGS),
    Mutant(
        "one-activation-for-each",
        "networks/architecture.py",
        "family.activation or s.activation",
        "s.activation",
        SETTINGS,
    ),
    Mutant(
        "silu-for-few-rows", "settings.py", '"auto" and n_groups > LARGE_TABLE', '"auto" and n_groups > 0', SETTINGS
    ),
    Mutant("setback-for-all", ENGINE, "self._put(self.good, lost)", "self._put(self.good, torch.ones_like(lost))", N),
    Mutant("smaller-steps-for-all", ENGINE, "torch.where(lost, 0.3, 1.0)", "torch.where(lost.any(), 0.3, 1.0)", N),
    Mutant(
        "best-state-not-restored",
        ENGINE,
        "self._put(self.best, torch.isfinite(self.best_score).to(self.loss.device))",
        "torch.isfinite(self.best_score)",
        f"{T}::test_training_stops_after_the_patience_and_returns_to_the_best",
    ),
    Mutant(
        "best-state-of-all-at-once",
        ENGINE,
        "better = self.running & (score < self.best_score - min_delta)",
        "better = (self.running & (score < self.best_score - min_delta)).any().expand(self.running.shape)",
        f"{N}::test_every_network_of_a_stack_ends_in_its_own_best_state",
    ),
    Mutant(
        "group-in-training-mode",
        MLP,
        "return super().train(False)",
        "return super().train(mode)",
        f"{N}::test_a_group_of_networks_stays_in_evaluation_mode",
    ),
    # --- the predictive formula
    *(
        Mutant(name, FORMULA, old, new, test)
        for name, old, new, test in (
            ("curve-without-power", "curve.power * known + (", "known + (", C),
            ("power-beyond-the-reach", "ops.minimum(log_cost, curve.log_reach)", "log_cost", C),
            ("no-growth-beyond-the-reach", " + (log_cost - known)", "", HAND),
            (
                "noise-grows-beyond-the-data",
                "ops.minimum(ops.maximum(z, head.low), head.high)",
                "z",
                f"{C}::test_noise_of_the_input_is_found_and_ends_at_the_edge_of_the_data",
            ),
            ("precision-to-the-power-q", "ops.row_mean(log_var)", "ops.row_sum(log_var)", C),
            ("members-count-alike", "log_var, model.sharpness,", "log_var, 0 * model.sharpness,", MIXTURE),
            ("poor-members-count-most", "(log_trust - sharpness * ops", "(log_trust + sharpness * ops", HAND),
            (
                "weights-follow-the-tuned-alpha",
                "star = shape if cost_star is cost else",
                "star = shape if cost_star is not None else",
                f"{MODEL}::test_tuning_moves_the_variance_alone_and_never_for_the_worse",
            ),
            (
                "cost-at-star",
                "shape = log_shape(ops, curve, ops.log(ops.at_least(cost, TINY)), far)\n    log_star",
                "shape = log_shape(ops, curve, ops.log(ops.at_least(cost_star, TINY)), far)\n    log_star",
                HAND,
            ),
            ("means-drawn-in-too-far", "np.sqrt(1.0 - fraction) * apart", "(1.0 - fraction) * apart", Y),
            ("merged-without-its-variance", "fraction * (weights * np.square(apart))", "0.0 * (weights * apart)", Y),
            ("outside-by-the-mean-cost-alone", "cost)[:, 0] > 0, 1.0, share)", "cost)[:, 0] > 2, 1.0, share)", FM),
            ("merged-inside-the-data", "np.minimum(u, inside) / u)", "np.maximum(u, inside) / u)", HAND),
            ("merged-by-the-last-reference", "np.maximum(fraction, 1.0 -", "np.maximum(0.0, 1.0 -", HAND),
            ("merged-by-one-member-of-a-reference", "cost[places].mean(0)", "cost[places][0]", HAND),
            ("no-shrinkage", "if model.log_precision is not None:", "if False:", MIXTURE),
            ("shrinkage-by-the-deviation", "-log_precision - log_var", "-log_precision - log_var / 2", HAND),
            ("cost-without-shift", "layer.root, layer.shift)", "layer.root, 0 * layer.shift)", HAND),
            (
                "cost-at-star-without-shift",
                "layer.root_star, layer.shift_star)",
                "layer.root_star, 0 * layer.shift_star)",
                HAND,
            ),
            ("mixture-without-spread-in-moments", "parts.epistemic) + between", "parts.epistemic)", MODULE),
            ("tails-without-noise-in-moments", "mean, epistemic, model.widening *", "mean, epistemic, 1.0 *", MODULE),
            ("tails-without-function-in-moments", "epistemic = model.widening *", "epistemic = 1.0 *", MODULE),
            (
                "covariance-without-noise",
                "(ops.outer(e, e) + ops.outer(n, n))",
                "ops.outer(e, e)",
                f"{Y}::test_the_covariance_of_the_targets_is_that_of_the_function_plus_that_of_the_noise",
            ),
            (
                "covariance-of-one-part",
                "correlation * (ops.outer(e, e) + ops.outer(n, n))",
                "correlation * ops.outer(ops.sqrt(epistemic + noise), ops.sqrt(epistemic + noise))",
                MOMENTS,
            ),
            ("no-stretch", "ops.exp(0.5 * (log_shape", "ops.exp(0.0 * (log_shape", MOMENTS),
            ("the-process-has-no-say", "ops.logaddexp(own, curve.log_share + far)", "own", HAND),
            ("the-process-counts-inside-too", "(cost - outside.inside, TINY)", "(cost, TINY)", FAR),
            ("the-process-without-its-noise", "return outside.log_noise + ops.log", "return ops.log", FAR),
            (
                "the-process-instead-of-a-member",
                "return own if far is None else ops.logaddexp(own, curve.log_share + far)",
                "return own if far is None else ops.maximum(own, curve.log_share + far)",
                HAND,
            ),
            (
                "stretched-as-inside",
                "log_shape(ops, curve, log_cost, far) - log_cost",
                "log_shape(ops, curve, log_cost, None) - log_cost",
                MOMENTS,
            ),
            (
                "bins-go-on-beyond-the-data",
                "ops.at_most(ops.at_least(x * encoding.slope + encoding.shift, 0.0), 1.0)",
                "ops.at_least(x * encoding.slope + encoding.shift, 0.0)",
                BINS,
            ),
        )
    ),
    Mutant("numpy-sigmoid", "ops.py", "np.minimum(x, 0.0)", "np.minimum(-x, 0.0)", FACES),
    Mutant("numpy-logaddexp", "ops.py", "np.exp(-np.abs(x - y))", "np.exp(-np.abs(x))", FACES),
    Mutant("numpy-softmax", "ops.py", "shares / shares.sum(0)", "shares / shares.max(0)", FACES),
    Mutant("casadi-sigmoid", "ops.py", "1 + ca.tanh(0.5 * x)", "1 + ca.tanh(x)", FACES),
    Mutant("casadi-logaddexp", "ops.py", "0.5 * (x + y + apart)", "0.5 * (x + y)", FACES),
    Mutant("casadi-total-for-average", "ops.py", "ca.sum2(x) / x.shape[1]", "ca.sum2(x)", FACES),
    Mutant("casadi-first-block-only", "ops.py", "int(filled[-1]) + 1)", "int(filled[-1]))", FACES),
    # --- what a fitted model is
    Mutant("tails-as-wide-as-the-rest", FITTED, "[1.0, factor])", "[1.0, 1.0])", MIXTURE),
    Mutant("one-curve-for-all-priors", PREDICTOR, "calibration.curves[family]", "calibration.curve", MIXTURE),
    Mutant("trust-for-each-member", PREDICTOR, "c.trust / families.count(f)", "c.trust", MIXTURE),
    Mutant("outside-in-other-units", PREDICTOR, "(factor - variance.mean(-1))", "factor", HAND),
    Mutant("outside-by-another-noise", PREDICTOR, "log_noise=noise.log().mean()", "log_noise=0 * noise.mean()", HAND),
    Mutant("process-as-sure-as-others", "calibration/curve.py", "return OWN_OUTSIDE if", "return 0.0 if", HAND),
    Mutant("shrinkage-in-other-units", PREDICTOR, " - 2 * scale.log()", " - 0 * scale.log()", MIXTURE),
    Mutant("variance-at-star", PREDICTOR, "else p.whitening(centre, a)", "else own", HAND),
    Mutant(
        "bias-known-in-formula",
        "posterior.py",
        "equations.bias_variance.sqrt()[..., None]",
        "0 * equations.bias_variance[..., None]",
        HAND,
    ),
    Mutant(
        "mean-without-weights",
        PREDICTOR,
        "TorchOps.total(parts.weights * parts.mean)",
        "parts.mean.mean(0)",
        f"{ASKED}::test_it_is_the_mean_and_the_deviation_of_predictive",
    ),
    Mutant(
        "mean-without-shrinkage",
        PREDICTOR,
        "self.log_precision is None and not self.sharpness",
        "not self.sharpness",
        f"{ASKED}::test_a_member_alone_is_shrunk_as_among_the_others",
    ),
    Mutant(
        "deviation-without-noise",
        FITTED,
        "_array(epistemic + noise)",
        "_array(epistemic)",
        f"{ASKED}::test_it_is_the_mean_and_the_deviation_of_predictive",
    ),
    Mutant(
        "rows-in-another-order",
        PREDICTOR,
        "[torch.cat(each, 1) for",
        "[torch.cat(each[::-1], 1) for",
        f"{ASKED}::test_many_rows_are_predicted_as_each_of_them_alone",
    ),
    Mutant(
        "draws-without-spread",
        FITTED,
        "* root * (parts.mean[block.member] - mean)",
        "* 0 * root",
        f"{MODEL}::test_draws_have_the_moments_of_the_joint_distribution",
    ),
    Mutant("joint-without-spread", FITTED, "* (parts.mean - mean)", "* 0 * (parts.mean - mean)", MOMENTS),
    Mutant("joint-noise-without-tails", FITTED, "self.tails.widening * NumPyOps", "1.0 * NumPyOps", MOMENTS),
    Mutant(
        "networks-not-copied",
        FITTED,
        "replace(m, network=copied(m.network))",
        "m",
        f"{MODEL}::test_what_is_done_to_networks_that_were_handed_over_does_not_reach_the_model",
    ),
    Mutant("module-not-copied", FITTED, "return copy.deepcopy(self.predictor)", "return self.predictor", OWN),
    Mutant(
        "network-handed-out",
        "estimators/base.py",
        "copied(fitted.members[0].network)",
        "fitted.members[0].network",
        OWN,
    ),
    Mutant(
        "module-in-training-mode",
        PREDICTOR,
        "return super().train(False)",
        "return super().train(mode)",
        f"{MODEL}::test_a_module_says_what_the_model_says_also_inside_a_parent_that_trains",
    ),
    Mutant(
        "alphas-not-together",
        REVISIONS,
        "tuple(log_alpha - centre + own for own in start) if len(start) > 1 else (log_alpha,)",
        "(log_alpha,) * len(start)",
        f"{MODEL}::test_at_its_own_alpha_a_model_is_what_it_was",
    ),
    Mutant(
        "alpha-around-all-members",
        REVISIONS,
        "np.mean(own[: len(fitted.best)])",
        "np.mean(own)",
        f"{MODEL}::test_at_its_own_alpha_a_model_is_what_it_was",
    ),
    Mutant(
        "conformal-scores-of-another-alpha",
        REVISIONS,
        "log_alphas=shifted, conformal_scores=None",
        "log_alphas=shifted",
        f"{MODEL}::test_conformal_scores_belong_to_the_model_and_not_to_its_views",
    ),
    Mutant(
        "calibration-keeps-a-tuned-alpha",
        REVISIONS,
        "log_alphas=tuple(float(member.layer.posterior.log_alpha) for member in members)",
        "log_alphas=fitted.log_alphas",
        f"{MODEL}::test_calibrate_promises_the_lpd_that_it_then_has",
    ),
    Mutant("tuned-alpha-lost", REVISIONS, "new if own == old else own + (new - old)", "new", TUNED),
    Mutant(
        "source-stopped-early",
        "parameters.py",
        '("auto", False), f"{whole}: choose max_epochs")',
        '("auto", False, True), f"{whole}: choose max_epochs")',
        f"{SETTINGS}::test_a_source_refuses_what_needs_all_rows_or_some_of_them_held_out",
    ),
    Mutant("conformal-rank-of-n", "prediction.py", "round((n + 1) * level, 9)", "round(n * level, 9)", Y),
    # --- users' tables, and the model without torch
    Mutant("numbers-guarded", "tables/writing.py", "and not number else", "and cell else", TABLES),
    Mutant("carriage-return-kept", "tables/writing.py", 'replace("\\r", "\\n")', 'replace("\\r", "\\r")', TABLES),
    Mutant(
        "filled-by-the-lowest",
        "tables/columns.py",
        "numbers(self.name, table, format=self.format, fill=self.fill",
        "numbers(self.name, table, format=self.format, fill=self.low",
        TABLES,
    ),
    Mutant("range-without-floor", "tables/columns.py", "(values < self.low) | (", "(values < -1e300) | (", TABLES),
    Mutant("any-unit", "tables/cells.py", 'unit != self.unit and (unit != "" or', 'unit == "" and (', CELLS),
    Mutant("decimal-point-alone", "tables/inference.py", "first = 1 if by_comma", "first = 0 if by_comma", CELLS),
    Mutant("week-from-sunday", "tables/cells.py", "np.floor(since) % 7 / 7", "since % 7 / 7", CELLS),
    Mutant("one-period-is-enough", "tables/columns.py", "PERIODS_SEEN = 2", "PERIODS_SEEN = 1", CELLS),
    Mutant(
        "nearly-counting", "tables/inference.py", "(np.diff(np.sort(values)) == 1)", "(np.diff(values) >= 1)", CELLS
    ),
    # --- models of log y
    Mutant("no-jacobian", "log_prediction.py", "density - jacobian.reshape", "density - 0 * jacobian.reshape", LOG),
    Mutant(
        "median-for-mean", "log_prediction.py", "log.component_mean + (v + n) / 2", "log.component_mean + 0 * v", LOG
    ),
    Mutant("noise-of-the-median", "log_prediction.py", "2 * mean + v + _log_expm1(n)", "2 * mean + _log_expm1(n)", LOG),
    Mutant("cov-of-one-sign", "log_prediction.py", "np.sign(S) * _exp", "_exp", LOG),
    Mutant("log-distance-of-sums", "metrics.py", "(mu1 - mu2 - v2) / s", "(mu1 - mu2 + v2) / s", LOG),
    Mutant("log-rows-raw", "predictor/fitted.py", "y = np.log(y)", "y = y + 0", LOG),
    Mutant("numpy-members-apart", "export/bundle.py", "var = var + between", "var = var + 0 * between", EXPORT),
    Mutant("numpy-thin-tails", "export/bundle.py", "factor * var", "var", EXPORT),
    Mutant("newton-half-way", "formula.py", "1e-8 * narrowest", "1e-3 * narrowest", Y),
    # --- control
    Mutant("cov-without-spread", "integrations/casadi.py", "cov + ca.reshape(", "cov + 0 * ca.reshape(", CA),
    Mutant("c-product-overwrites", "integrations/c_code.py", "c[i] += a[i] * b", "c[i] = a[i] * b", CA),
    Mutant(
        "attention-unscaled",
        "integrations/casadi_network.py",
        "a / math.sqrt(q.shape[-1])",
        "a / math.sqrt(k.shape[-2])",
        CA,
    ),
    Mutant(
        "layer-norm-without-eps",
        "integrations/casadi_network.py",
        "a / self.ca.sqrt(v + eps)",
        "a / self.ca.sqrt(v)",
        CA,
    ),
    Mutant("rows-cross-borders", "dynamics/data.py", "max(self.outputs, self.inputs) - 1", "self.inputs - 1", D),
    Mutant("cross-forgotten", "dynamics/rollout.py", "between = F @ moments.cross", "between = 0 * moments.cross", D),
    Mutant("tails-drawn-twice", "dynamics/rollout.py", "np.sqrt(tail / member.tails.widening)", "np.sqrt(tail)", FIRST),
    # --- learning while running
    Mutant("root-without-c", "recursion.py", "-s / (pivot + math.sqrt(pivot))", "-s / pivot", RC),
    Mutant("gain-of-the-old-rows", "recursion.py", "ger(s / pivot, error", "ger(s, error", RC),
    Mutant("weights-not-counted", "recursion.py", "s = sign * weight", "s = sign", RC),
    Mutant("another-row-taken-in", "online/model.py", "or self._last[0] != key", "or False", KEPT_DIGITS),
    Mutant("exponent-halved", "ops.py", "math.exp(x) if x < 709.0", "math.exp(0.5 * x) if x < 709.0", KEPT_DIGITS),
    Mutant("passed-on-unscaled", "formula.py", "network.passed * z)", "z)", EXPORT),
    Mutant("chance-begins-anew", "online/drift.py", 'state = header["random"]', 'state; header["random"]', SAVED),
    Mutant("rows-since-forgotten", "online/layers.py", "if since else []", "if False else []", SAVED),
    Mutant("bias-known", "recursion.py", "equations.bias_variance.sqrt()", "0 * equations.bias_variance", RC),
    Mutant("spectrum-never", "recursion.py", "SPECTRAL = 1e4", "SPECTRAL = 0.0", RC),
    Mutant("fades-too-slowly", "online/memory.py", "math.exp(-n / self.memory)", "math.exp(-1 / self.memory)", FADES),
    Mutant("window-keeps-all", "online/model.py", "for j in range(gone))", "for j in range(0))", WINDOW),
    Mutant("digits-not-guarded", "online/layers.py", "SMALLEST_PIVOT = 1e-4", "SMALLEST_PIVOT = 0.0", LEVERAGE),
    Mutant(
        "drop-not-guarded",
        "online/layers.py",
        "LARGEST_DROP, LEAST_WEIGHT = 1e4",
        "LARGEST_DROP, LEAST_WEIGHT = 1e40",
        HOSTILE,
    ),
    Mutant("root-not-guarded", "online/layers.py", "LARGEST_PIVOT = 1e8", "LARGEST_PIVOT = 1e300", HUGE),
    Mutant("removal-of-all-digits", "posterior.py", "REMOVAL_RTOL = 1e-5", "REMOVAL_RTOL = 1e5", REMOVED),
    Mutant("left-is-rounding", "posterior.py", "scatter - 100 * ROUNDING * energy", "scatter", REMOVED),
    Mutant("removal-unchecked", "statistics.py", "if bool(lowest < -1e-10", "if bool(lowest < -1e10", NEVER),
    Mutant("alpha-not-anew", "online/model.py", "revisions.reestimate(self.fitted_)", "self.fitted_", ANEW),
    Mutant("dependence-not-allowed-for", "online/drift.py", "r: ndarray = cov", "r: ndarray = 0 * cov", DRIFT),
    Mutant(
        "exchangeable-forgotten", "online/drift.py", "np.maximum(np.max(likely, 0), log_p(0 * r))", "likely[1]", DRIFT
    ),
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
        "botorch-without-spread",
        GAUSSIAN,
        "* (parts.mean - mean)).movedim",
        "* 0 * (parts.mean - mean)).movedim",
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
        "box-of-the-points",
        SURROGATE,
        "X.amax(0)]) if bounds is None else",
        "X.amax(0)]) if True else",
        f"{BT}::test_lengths_do_not_change_where_points_gather",
    ),
    Mutant("regret-of-the-last", "benchmarks/bo/problems.py", "Y[:, 0].cummax(0).values", "Y[:, 0]", BO),
    Mutant("back-off-by-mean", "integrations/do_mpc.py", "ndtri(probability)", "(probability - 0.5)", BACK_OFF),
    Mutant(
        "targets-scaled-later",
        "statistics.py",
        "energy=self.energy * unit.square()",
        "energy=self.energy * unit",
        SCALED,
    ),
    Mutant("attach-units", "estimators/posthoc.py", "raw.with_targets(targets.mean, targets.scale)", "raw", BY_HAND),
    Mutant("attach-shares", "estimators/posthoc.py", "process_group.reduce(Statistics", "(Statistics", TWO),
    Mutant("attach-padding", ATTACHED, "kept &= mask.to(kept.device) != 0", "pass", EVERY_TOKEN),
    Mutant("attach-ids", "networks/structured.py", " if x.is_floating_point() else x.dtype", "", EVERY_TOKEN),
    Mutant(
        "attach-channels", ATTACHED, "return 1 if isinstance(network", "return -1 if isinstance(network", CONVOLUTION
    ),
    Mutant(
        "loss-of-processes", "training/loss.py", "carrier = running.process_group.world_size * (", "carrier = (", TWO
    ),
    Mutant(
        "loss-value",
        "training/loss.py",
        "offset + running.process_group.world_size * rows.loss",
        "offset + rows.loss",
        TWO,
    ),
    Mutant(
        "loss-gradient",
        "training/loss.py",
        "return value + carrier - carrier.detach()",
        "return value + carrier",
        FIRST_LOSS,
    ),
    # --- baselines
    Mutant(
        "divergence-by-entries",
        VARIATIONAL,
        "misfit / len(T), self.kl() / len(T)",
        "misfit / len(T), self.kl() / T.numel()",
        f"{B}::test_the_bound_is_likelihood_and_divergence_of_all_weights_a_sample",
    ),
    Mutant(
        "local-draws-with-a-floor",
        VARIATIONAL,
        "(x.square() @ self.std.square()).sqrt()",
        "(x.square() @ self.std.square() + 1e-4).sqrt()",
        f"{B}::test_the_spread_of_local_draws_is_that_of_the_weights_however_small",
    ),
    Mutant("kernel-variance", "integrations/gpytorch.py", "alpha * _noise_var", "_noise_var", "test_gpytorch.py"),
    Mutant("kernel-bias", "integrations/gpytorch.py", "over_alpha.sqrt() if", "over_alpha if", "test_gpytorch.py"),
    # --- folders of Parquet files, predictions batch by batch
    Mutant(
        "every-process-from-the-first-row",
        "parquet.py",
        "for rank in range(process_group.rank))",
        "for rank in range(0))",
        "test_parquet.py",
    ),
    Mutant(
        "row-groups-from-their-first-row",
        "sources.py",
        "np.clip(at - before, 0, self.rows)",
        "np.clip(at - before, 0, self.rows) * (at >= stop)",
        "test_parquet.py",
    ),
    Mutant(
        "old-model-for-new-file",
        "integrations/batches.py",
        "return load_once(str(path), version)",
        "return load_once(str(path), None)",
        "test_batches.py",
    ),
    # --- targets partly missing, noise partly known, functionals
    Mutant("functionals-with-a-bias", "statistics.py", "rest = rows - one * mean", "rest = rows - mean", OBSERVED),
    Mutant("functionals-not-weighted", "statistics.py", "rest.mT @ (w * rest)", "rest.mT @ rest", OBSERVED),
    Mutant("count-of-functionals", "statistics.py", "(w * one.square()).sum((-2, -1))", "w.sum((-2, -1))", OBSERVED),
    Mutant("missing-targets-count", "statistics.py", "weight * (own > 0)", "weight * (own >= 0)", OBSERVED),
    Mutant(
        "outputs-share-their-rows",
        "statistics.py",
        "own = weight * precision[..., j]",
        "own = weight * precision[..., 0]",
        OBSERVED,
    ),
    Mutant(
        "outputs-with-an-alpha-each",
        "evidence.py",
        "slope=(share * each.slope).sum(-1)",
        "slope=each.slope[..., 0]",
        OBSERVED,
    ),
    Mutant(
        "outputs-weigh-the-same", "evidence.py", "nlml=(share * each.nlml).sum(-1)", "nlml=each.nlml.sum(-1)", OBSERVED
    ),
    Mutant("bias-counts-as-noise", "evidence.py", "- 2 * free * log_sigma_e", "- 0 * free * log_sigma_e", OBSERVED),
    Mutant("known-noise-without-misfit", "evidence.py", "+ S * torch.exp(-2 * log_sigma_e)", "+ S", OBSERVED),
    Mutant("values-for-slopes", "observe.py", "whole if slopes is None else whole + slopes", "whole", OBSERVED),
    Mutant(
        "slopes-in-other-units",
        "observe.py",
        "_tensor(self.directions) / inputs.scale",
        "_tensor(self.directions)",
        OBSERVED,
    ),
    Mutant("totals-in-other-units", "observe.py", "- mean * rows.weights.sum(1)) / scale", "- mean) / scale", OBSERVED),
    Mutant(
        "known-noise-in-other-units",
        "observe.py",
        "(_tensor(self.noise_std) / scale).square()",
        "_tensor(self.noise_std).square()",
        OBSERVED,
    ),
    Mutant("functional-without-spread", PREDICTOR, "columns.append(apart.mT)", "pass", OBSERVED),
    Mutant("missing-errors-count", LIKELIHOOD, "self.known * (self.targets - mean)", "self.targets - mean", OBSERVED),
    Mutant(
        "known-variance-forgotten",
        LIKELIHOOD,
        "of_model = np.exp(log_var - of_target)",
        "of_model = np.ones(())",
        OBSERVED,
    ),
    Mutant(
        "centres-of-outputs-forgotten",
        "posterior.py",
        "apart = centre - equations.feature_mean",
        "apart = 0 * equations.feature_mean",
        OBSERVED,
    ),
    Mutant("patterns-of-noise-forgotten", "patterns.py", "L.mT @ B @ L, self.gram", "eye + 0 * B, self.gram", PATTERNS),
    Mutant("biases-without-unit", "patterns.py", "- q * log_2pi - Cholesky", "- q * log_2pi - 0 * Cholesky", PATTERNS),
    Mutant("prior-on-flat-biases", "patterns.py", "prior[self.n_penalised :] = 0.0", "pass", PATTERNS),
    Mutant("missing-targets-shown", "patterns.py", "(T * pattern)", "T", PATTERNS),
    Mutant(
        "outputs-share-draws",
        PREDICTOR,
        "torch.kron(torch.linalg.cholesky(cov)[output], H)",
        "cov[output, output].sqrt() * H",
        f"{OBSERVED}::test_functionals_of_two_outputs_are_independent_where_these_are",
    ),
]


def run_tests(package: Path, tests: list[str]) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the repository, and what pytest printed."""
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
    text = (original / mutant.path).read_text()
    if (found := text.count(mutant.old)) != 1:
        return False, f"STALE: its old text occurs {found} times in {mutant.file}"
    copy = place / mutant.name
    shutil.copytree(original, copy)
    file = copy / mutant.path
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
        for part in ("src", "tests", "examples", "benchmarks"):
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
