"""The examples that observe derivatives and sums: each runs, and what it claims of its table holds."""

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "physics"
pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def table_of(tmp_path, monkeypatch, capsys):
    """The scores of an example, whose table was printed and whose picture was saved."""
    monkeypatch.syspath_prepend(FOLDER)

    def run(name):
        table = import_module(name).main(tmp_path)
        printed = capsys.readouterr().out
        assert all(row in printed for row in table)
        assert 10_000 < (tmp_path / f"{name}.png").stat().st_size < 80_000
        return table

    return run


def ratio(table, more, less):
    """Of the root mean square errors of two rows."""
    return table[more][0] / table[less][0]


def gain(table, more, less):
    """In LPD."""
    return table[more][1] - table[less][1]


def test_every_example_is_tried():
    own = Path(__file__).read_text()
    assert all(f'"{path.stem}"' in own for path in FOLDER.glob("*.py") if path.stem != "shared")


@pytest.mark.parametrize("name", ["energy_from_forces", "molecule_from_forces"])
def test_forces_more_than_halve_the_errors_of_energy_and_force(name, table_of):
    table = table_of(name)
    for what in ("energy", "force"):
        rows = f"{what}, from energies and forces", f"{what}, from energies"
        assert ratio(table, *rows) < 0.5
        assert gain(table, *rows) > 1
        assert table[rows[0]][2] > 0.7


def test_totals_show_the_flow_and_rates_sharpen_it(table_of):
    table = table_of("flow_from_rates")
    levels, totals, rates = table
    assert ratio(table, totals, levels) < 0.4
    assert ratio(table, rates, totals) < 0.9
    assert gain(table, rates, levels) > 1


def test_a_flat_axis_helps_where_the_core_is_flat(table_of):
    table = table_of("flat_at_boundary")
    rows = "shear-thinning, with wall and flat axis", "shear-thinning, with wall"
    assert ratio(table, *rows) < 0.5
    assert gain(table, *rows) > 1
    assert table[rows[0]][2] > 0.8


def test_totals_of_buildings_tell_the_parts(table_of):
    table = table_of("parts_from_totals")
    flats, buildings = table
    assert ratio(table, buildings, flats) < 0.5
    assert gain(table, buildings, flats) > 1
    assert table[buildings][2] > 0.8
