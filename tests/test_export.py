"""The NumPy bundle says what the model says, where neither torch nor lastlayer can be imported."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import refused
from models import data, far, fitted
from torch import nn

from lastlayer import BLLRegressor
from lastlayer.integrations.export import export_bundle, reader, to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import FOURIER
from lastlayer.tables import Table, TableRegressor, forecast, read

pytestmark = pytest.mark.usefixtures("small_process")

ROOT = Path(__file__).parents[1]
PUMP, NEW = ROOT / "examples" / "pump.csv", ROOT / "examples" / "pump_new.csv"
FAST = {"hidden": (6,), "max_epochs": 10, "preset": "evidence", "random_state": 0}


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "lastlayer", "scipy", "sklearn", "pickle"):
            raise ImportError(f"{name} is blocked")

for name in [n for n in sys.modules if n.split(".")[0] in ("torch", "lastlayer", "scipy", "sklearn")]:
    raise SystemExit(f"{name} was there before")
sys.modules.pop("pickle", None)
import numpy  # NumPy itself imports pickle
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[1])
import json
from predict import Bundle

bundle = Bundle(sys.argv[1] + "/model.npz")
p = bundle.predict(bundle.inputs(json.load(sys.stdin)))
lower, upper = p.interval(0.9)
assert not {"torch", "lastlayer", "scipy"} & set(sys.modules)
print(json.dumps([x.tolist() for x in (p.mean, p.std, lower, upper, p.affine_cost)]))
"""


def printed(program: str, folder: Path, rows: object) -> list[list]:
    """What it prints of the rows, by an interpreter that finds neither the package nor torch."""
    command, words = [sys.executable, "-I", "-c", program, str(folder)], {"capture_output": True, "text": True}
    done = subprocess.run(command, input=json.dumps(rows), cwd=folder, check=False, **words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_says(found: list[list], p: MixturePrediction, **tolerance: float) -> None:
    for ours, theirs in zip(found, (p.mean, p.std, *p.interval(0.9), p.affine_cost), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, **tolerance)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[TableRegressor, Path]:
    model = TableRegressor(**FAST).fit(read(PUMP), target=["head_m", "power_kw"])
    folder = tmp_path_factory.mktemp("bundle") / "pump"
    assert [path.name for path in export_bundle(model, folder)] == ["model.npz", "predict.py"]
    return model, folder


def test_it_predicts_raw_rows_where_torch_cannot_be_imported(exported):
    (model, folder), t = exported, read(NEW)
    found = printed(ALONE, folder, {name: cells.tolist() for name, cells in t.columns.items()})
    assert_says(found, model.predictive(t))


def test_its_own_command_predicts_a_csv(exported, tmp_path):
    model, folder = exported
    command = [sys.executable, str(folder / "predict.py")]
    done = subprocess.run([*command, str(NEW)], capture_output=True, text=True, check=True)
    (tmp_path / "out.csv").write_text(done.stdout)
    out, cells = read(tmp_path / "out.csv").columns, forecast(model, read(NEW)).cells
    for name in ("head_m_mean", "power_kw_upper", "affine_cost", "extrapolation"):
        np.testing.assert_allclose(out[name].astype(float), cells[name], rtol=1e-9)
    (tmp_path / "bad.csv").write_text(NEW.read_text().replace("oil", "beer"))
    failed = subprocess.run([*command, str(tmp_path / "bad.csv")], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "'beer'" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_exported_module_imports_python_and_numpy_alone(exported):
    tree = ast.parse(reader())
    assert (exported[1] / "predict.py").read_text() == reader()
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) == {"numpy"}


@pytest.mark.parametrize("name", ["alpha tuned", "mixture, noise by input", "families, alpha tuned"])
def test_a_file_of_its_own_says_what_the_model_says(tmp_path, name):
    """Without columns."""
    model, X = fitted(name), far(data()[0])
    np.savez(tmp_path / "model.npz", **to_arrays(model))
    (tmp_path / "predict.py").write_text(reader())
    program = ALONE.replace("bundle.inputs(json.load(sys.stdin))", "json.load(sys.stdin)")
    assert_says(printed(program, tmp_path, X.tolist()), model.predictive(X), atol=1e-9)


def test_a_mixture_of_families_is_exported_with_bins_and_process(tmp_path, exported):
    """Numbers, whole ones for the order of members and the inputs of bins, and a text: no pickle is needed."""
    with np.load(exported[1] / "model.npz", allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "fU" for name in file.files)
    model = fitted("mixture of families")
    np.savez(tmp_path / "m.npz", allow_pickle=False, **to_arrays(model))
    with np.load(tmp_path / "m.npz", allow_pickle=False) as file:
        whole = {name for name in file.files if file[name].dtype.kind == "i"}
        assert all(file[name].dtype.kind in "fU" for name in set(file.files) - whole)
        assert {"column"} <= {name.rsplit(".", 1)[1] for name in whole} <= {"order", "column"}
        about, outside = json.loads(str(file["about"])), float(file["model.outside.inside"])
    families = [member.family for member in model.fitted_.members]
    assert {str(family) for family in families} >= {"piecewise network 0.3", "piecewise linear", "fourier"}
    assert about["state"]["model"]["outside"]["place"] == families.index(FOURIER)
    assert outside == model.calibration_.outside.inside


def test_strange_rows_are_refused(exported):
    bundle = Bundle(exported[1] / "model.npz")
    row = {"flow_m3h": ["20"], "speed_rpm": [2000], "temperature_c": [20.0], "fluid": ["water"]}
    assert bundle.predict(bundle.inputs(row)).mean.shape == (1, 2)
    for change, message in (
        ({"flow_m3h": [None]}, "no value"),
        ({"flow_m3h": ["many"]}, "many"),
        ({"fluid": ["beer"]}, "known values are"),
        ({"speed_rpm": [float("inf")]}, "not finite"),
    ):
        refused(message, lambda row: bundle.predict(bundle.inputs(row)), row | change, error=ValueError)
    refused("is missing", bundle.inputs, {}, error=ValueError)
    refused("takes", bundle.predict, np.zeros((2, 3)), error=ValueError)


def test_a_backbone_cannot_be_exported():
    network = nn.Linear(3, 3)
    refused("backbone", to_arrays, BLLRegressor(backbone=network, **FAST | {"hidden": ()}).fit(*data()))


def test_dates_units_and_missing_cells_are_read_as_the_model_reads_them(tmp_path):
    days = [str(day) for day in np.datetime64("2024-01-01") + np.arange(40)]
    mass = [f"{i % 7},5 kg" for i in range(40)]
    kind = ["a", "b"] * 20
    columns = {"day": [*days[:39], ""], "mass": ["", *mass[1:]], "kind": [*kind[:5], "", *kind[6:]], "y": range(40)}
    table = Table({name: np.array(list(cells), dtype=object) for name, cells in columns.items()})
    model = TableRegressor(impute="median", likelihood="gaussian", **FAST).fit(table, target="y")
    export_bundle(model, tmp_path / "m")
    bundle = Bundle(tmp_path / "m" / "model.npz")
    np.testing.assert_array_equal(bundle.inputs(columns), model.schema_.encode(table).X)
    for name, cell in {"day": "soon", "mass": "3 g", "kind": "c"}.items():
        with pytest.raises(ValueError, match=f"{name!r} has {cell!r} in row 3"):
            bundle.inputs(columns | {name: [*columns[name][:2], cell, *columns[name][3:]]})
