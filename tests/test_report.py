"""What the report says in words, against rows whose coverage is known."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import EVIL, evil_table, table

from lastlayer.report import make_report
from lastlayer.report.figures import Evaluation
from lastlayer.report.verdict import by_fifth, by_group, judged, verdict
from lastlayer.tables import Table, TableRegressor
from lastlayer.tables.numbers import percent, plain, written

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1742345.6, 4, "1,742,000"),
        (0.99996, 4, "1.000"),
        (999.96, 4, "1,000"),
        (-12.3456, 3, "-12.3"),
        (12.0, 4, "12"),
        (0.0, 4, "0"),
        (3e-7, 3, "3.00e-07"),
        (float("inf"), 3, "inf"),
        (float("nan"), 3, "n/a"),
    ],
)
def test_numbers_are_written_as_people_do(value, digits, text):
    assert written(value, digits) == text


def test_numbers_of_a_table_keep_their_digits():
    assert [plain(x) for x in (1742000.0, 8.680, 60.0, 2895, 1e-9)] == ["1,742,000", "8.68", "60", "2,895", "1e-09"]
    assert (percent(0.894), percent(float("nan"))) == ("89%", "n/a")


def evaluation(inside: np.ndarray, outside: np.ndarray, names=("y",)) -> Evaluation:
    """Rows of which it is known whether they lie inside 90% intervals, and inside the training data."""
    m, q = inside.shape
    mean = np.arange(float(m))[:, None] * np.ones(q)
    interval = lambda level: (mean - 1, mean + 1)
    p = SimpleNamespace(point=mean, std=np.ones((m, q)), interval=interval, discrete=False)
    where = SimpleNamespace(quantile=np.zeros(m), affine_cost=np.ones(m))
    encoded = SimpleNamespace(outside=outside[:, None])
    kind = np.array(["left", "right"], dtype=object)[(np.arange(m) >= m // 4).astype(int)]
    fitted = SimpleNamespace(schema_=SimpleNamespace(targets=names))
    return Evaluation(fitted, Table({"kind": kind}), encoded, p, np.where(inside, mean, mean + 2), where, None)


def test_the_verdict_says_whether_intervals_hold():
    m, nowhere = 200, np.zeros(200, dtype=bool)
    right, narrow = (np.arange(m)[:, None] % 10 < n for n in (9, 7))
    said, warning = verdict(evaluation(right, nowhere))
    held = "The 90% intervals hold: 180 of 200 true values of y (90%) lie inside."
    assert (said, warning) == (f"{held} No row lies outside the training data.", False)
    said, warning = verdict(evaluation(np.hstack([right, narrow]), nowhere, ("u", "v")))
    assert "hold: 180 of 200 true values of u (90%)" in said
    assert "are too narrow on these rows: 140 of 200 true values of v (70%)" in said
    assert warning
    said, warning = verdict(evaluation(np.ones((m, 1), dtype=bool), nowhere))
    assert "are wider than needed" in said
    assert not warning


def test_the_verdict_warns_of_rows_outside_on_which_intervals_fail():
    outside = np.arange(200) >= 180
    inside = ~outside[:, None] | (np.arange(200)[:, None] % 2 == 0)
    said, warning = verdict(evaluation(inside, outside))
    assert "20 rows lie outside the training data: there the intervals contain 50% of the true values of y." in said
    assert "hold: 190 of 200" in said or "wider" in said
    assert warning


def test_coverage_by_fifth_and_by_group():
    inside = (np.arange(100) >= 20)[:, None]
    rows = evaluation(inside, np.zeros(100, dtype=bool))
    head, *fifths = by_fifth(rows)
    assert [line[:4] for line in fifths[:2]] == [["y", "0 to 19", "20", "0%"], ["", "20 to 39", "20", "100%"]]
    assert [line[5] for line in fifths] == ["too narrow"] + ["as expected"] * 4
    assert head[1] == "prediction"
    head, *groups = by_group(rows, "kind")
    assert [line[:4] for line in groups] == [["y", "right", "75", "100%"], ["", "left", "25", "20%"]]
    assert groups[0][6] == "0"
    assert judged(0.9, 1000) == "as expected"


@pytest.fixture(scope="module")
def fitted() -> TableRegressor:
    rng = np.random.default_rng(0)
    model = TableRegressor(drop=["id"], preset="evidence", hidden=(3,), max_epochs=5)
    return model.fit(rows_of(rng, 40), target="y")


def rows_of(rng, m: int) -> Table:
    x, kind = rng.uniform(0, 1, m), rng.choice(["a", "b"], m)
    y = 2e6 * x + 1e6 * (kind == "b") + 1e4 * rng.normal(size=m)
    names = [f"pump {i}" for i in range(m)]
    return table(x=x, kind=kind, id=names, y=y)


def test_texts_of_a_table_are_never_markup():
    """Names of files, columns and targets, and cells, wherever they appear: in tables, sentences and figures."""
    rows = evil_table(40, 0)
    model = TableRegressor(preset="evidence", hidden=(3,), max_epochs=2).fit(rows, target=f"y{EVIL}")
    names = {"model_name": f"m{EVIL}", "data_name": f"d{EVIL}", "group": f"kind{EVIL}"}
    page = make_report(model, rows, **names).html
    assert "<img" not in page
    assert page.count("</script>") == page.count("<script")
    for name in ("m", "d", "kind", "id", "x"):
        assert f"{name}&lt;/script&gt;&lt;img" in page


def test_the_page_names_rows_and_writes_numbers_out(fitted):
    rows = rows_of(np.random.default_rng(1), 30)
    made = make_report(fitted, rows, model_name="m", data_name="d", group="kind")
    head, first = re.findall(r"<tr>(.*?)</tr>", made.html[made.html.index('<table id="wrong">') :])[:2]
    cells = re.findall(r">([^<]*)</th>", head)
    assert cells[:6] == ["row", "id", "y", "predicted", "error", "error / std"]
    values = re.findall(r">([^<]*)</td>", first)
    assert values[1].startswith("pump ")
    assert re.fullmatch(r"-?\d,\d{3},000|\d{3},\d00", values[2])
    assert made.verdict.startswith("The 90% intervals")
    assert "<h3>By kind</h3>" in made.html
    assert "y depends most on x" in made.html
    assert "By kind" not in make_report(fitted, rows, model_name="m", data_name="d").html
