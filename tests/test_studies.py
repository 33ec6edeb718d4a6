import numpy as np

from lastlayer.studies import data, example, recipe


def test_the_data_are_the_papers():
    d = data.paper_data()
    assert [len(s.X) for s in (d.train, d.validation, d.test)] == [160, 40, 100]
    inside = np.vstack([d.train.X, d.validation.X])
    # the legacy generator's first draws for seed 99, in single precision
    draws = np.random.RandomState(99).uniform(size=200).astype(np.float32)
    assert set(np.float32(inside[:, 0]).tolist()) == set(draws.tolist())
    assert d.test.X.min() >= -0.4
    assert d.test.X.max() <= 1.4
    residual = np.vstack([d.train.y, d.validation.y]) - data.truth(inside)
    assert np.allclose(residual.std(0), data.NOISE_STD, rtol=0.15)
    other = data.paper_data(seed=7)
    assert not np.allclose(other.train.X, d.train.X)


def test_the_example_writes_scores_and_a_picture(tmp_path, capsys):
    assert example.main(["--out", str(tmp_path / "new" / "folder")]) == 0
    folder = tmp_path / "new" / "folder"
    assert (folder / "prediction.png").stat().st_size > 10_000
    assert "test, outside" in (folder / "scores.txt").read_text()
    assert "Algorithm 1" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert example.main(["--out", str(tmp_path / "file" / "inside")]) == 1
    assert "choose another --out" in capsys.readouterr().out


def test_the_recipe_prints_its_figures_beside_the_published(capsys):
    table = recipe.main(["--initialisations", "1", "--max-epochs", "40"])
    out = capsys.readouterr().out
    assert "-18.1400" in out
    assert all(np.isfinite(values).all() for values in table.values())
