"""The studies of learned dynamics at a small budget, and their plants against slow forms."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import lastlayer
from benchmarks.control_studies import mpc, reactor, spring
from benchmarks.control_studies.controllers import true_model
from benchmarks.control_studies.discs import Discs
from lastlayer import BLLRegressor
from lastlayer.dynamics import DynamicsModel, Lags, Linearized, Unscented

pytest.importorskip("casadi")
pytestmark = [
    pytest.mark.filterwarnings("ignore:\\s*casadi. a numpy function:FutureWarning"),
    pytest.mark.usefixtures("as_a_user"),
]


def test_discs_step_as_their_differential_equation():
    discs = Discs()
    rng = np.random.default_rng(0)
    x, u = rng.standard_normal(6), rng.standard_normal(2)
    J, c, d = discs.inertia, discs.stiffness, discs.damping

    def slope(_, x):
        """Torques one by one."""
        angle = np.array([u[0], *x[:3], u[1]])
        twist = np.diff(angle)
        torque = [c[i + 1] * twist[i + 1] - c[i] * twist[i] - d[i] * x[3 + i] for i in range(3)]
        return [*x[3:], *(t / j for t, j in zip(torque, J, strict=True))]

    wanted = solve_ivp(slope, (0, discs.step_s), x, rtol=1e-11, atol=1e-12).y[:, -1]
    F, G = discs.discrete()
    np.testing.assert_allclose(F @ x + G @ u, wanted, rtol=1e-8)
    assert np.abs(np.linalg.eigvals(F)).max() < 1  # it comes to rest


def test_discs_episodes_keep_their_amplitude_and_noise():
    episode = Discs().episode(np.pi, 2000, 0)
    assert np.abs(episode.inputs).max() <= np.pi
    assert np.abs(Discs().episode(2 * np.pi, 2000, 0).inputs).max() > np.pi
    held = (np.diff(episode.inputs, axis=0) == 0).mean()
    assert 0.7 < held < 0.8


@pytest.mark.parametrize("by", [Linearized(), Unscented()])
def test_covariances_of_the_discs_stay_positive_over_many_steps(by, as_a_user):
    """Rounding errors of one side of a covariance, if left there, grow to its size within 100 steps of this plant."""
    discs, lags = Discs(), Lags(3, 3)
    train = discs.episodes(12, np.pi, 80, 0)
    model = DynamicsModel(lags, BLLRegressor((), preset="evidence", max_epochs=40, random_state=0)).fit(train)
    window = lags.windows(discs.episodes(6, np.pi, 104, 2), 100)
    rollout = model.rollout(window.starts, window.inputs, by=by)
    assert (np.linalg.eigvalsh(rollout.cov) > 0).all()
    assert rollout.std.max() < 2


def test_reactor_steps_as_its_differential_equation():
    plant = reactor.Reactor()
    x = np.array([0.6, 345.0])

    def slope(_, x):
        r = 7.2e10 * np.exp(-8750 / x[1]) * x[0]
        return [1 - x[0] - r, 350 - x[1] + 5e4 / 239 * r + 5e4 / 23900 * (300 - x[1])]

    wanted = solve_ivp(slope, (0, 0.1), x, rtol=1e-11, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(plant.step(x, 300.0), wanted, rtol=1e-8)
    model = true_model()
    model.setup()
    np.testing.assert_allclose(model._rhs_fun(x, 300.0, [], [0, 0], [], []).full()[:, 0], wanted, rtol=1e-6)


def test_the_experiments_leave_the_hot_region_unexplored_and_starts_can_be_held(as_a_user):
    episodes = reactor.experiments(10)
    for episode in episodes:
        assert (episode.outputs[:-1, 1] <= reactor.INTERLOCK).all()
    x = reactor.starts()
    assert x.shape == (20, 2)
    for _ in range(60):
        x = reactor.Reactor().step(x, np.full(20, reactor.COOLANT[0]))
        assert (x[:, 1] < reactor.LIMIT).all()


def test_the_spring_study_runs(tmp_path, as_a_user):
    budget = spring.Budget(
        train_episodes=4, train_steps=15, test_episodes=2, horizon=6, hidden=(4,), n_members=2, max_epochs=5
    )
    text = spring.run(tmp_path, seeds=[0], budget=budget)
    for row in ("BLL", "BLR, alpha^max", "linear", "unscented"):
        assert f"| {row} |" in text
    assert {p.name for p in tmp_path.iterdir()} == {"spring.md", "spring-trajectory.png", "spring-lpd.png"}


def test_the_control_study_runs(tmp_path, as_a_user):
    text = mpc.run(tmp_path, n_experiments=6, n_starts=1, steps=2, max_epochs=5, horizon=4)
    for row in mpc.KINDS:
        assert f"| {row} |" in text
    assert {p.name for p in tmp_path.iterdir()} == {"mpc.md", "mpc-runs.png", "mpc-plane.png"}


def test_a_result_counts_steps_and_runs():
    hot, cool = (np.array([[0.5, 350.0], [0.5, T], [0.5, 350.0]]) for T in (361.0, 359.0))
    coolant = np.array([295.0, 300.0])
    result = mpc.Result([reactor.Run(hot, coolant), reactor.Run(cool, coolant)], np.ones(4), 0)
    assert result.violation_rate == 0.25
    assert result.runs_violated == 1
    assert result.hottest == 361.0
    np.testing.assert_allclose(result.mean_cost, 2 * 100 * 0.15**2 + 1e-3 * 25)


@pytest.mark.parametrize("study", [spring, mpc])
def test_a_folder_that_cannot_be_written_is_said(study, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert study.main(["--out", str(tmp_path / "file" / "x")]) == 1
    assert "cannot write" in capsys.readouterr().out


def test_the_code_of_the_page_runs(monkeypatch, tmp_path, as_a_user):
    page = Path(__file__).parents[1] / "docs" / "control.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert len(blocks) == 6
    monkeypatch.chdir(tmp_path)
    fewer = partial(BLLRegressor, max_epochs=30, n_members=1, hidden_prior=0.3)
    monkeypatch.setattr(lastlayer, "BLLRegressor", fewer)  # the code, not its patience
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    assert names["lower"].shape == (1, 20, 2)
    assert names["cov"].shape == (2, 2)
    assert -3 <= names["u"][0] <= 3
    assert "int pendulum(" in (tmp_path / "pendulum.c").read_text()
    assert names["A"].shape == (2, 2)
