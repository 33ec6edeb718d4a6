"""What the README shows must run."""

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.cli import app

ROOT = Path(__file__).parents[1]


def test_the_readmes_code_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        lastlayer, "BLLRegressor", partial(BLLRegressor, max_epochs=20, n_members=2)
    )  # the code, not its patience
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "model.lastlayer").exists()
    assert names["mean"].shape == names["std"].shape == (100, 2)


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], key=str), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_commands_of_the_cli_page_run_as_typed(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page, flags=re.S) for line in block.splitlines()]
    assert len(commands) == 7
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "lastlayer"
        quick = ["--max-epochs", "5", "--members", "2"] if words[0] == "fit" else []  # the command, not its patience
        done = CliRunner().invoke(app, [*words, *quick])
        assert done.exit_code == 0, done.output
    for name in ("pump.lastlayer", "pump_new.predicted.csv", "pump.report.html", "updated.lastlayer", "pump-numpy"):
        assert (tmp_path / name).exists()
        assert name in page or name == "updated.lastlayer"
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    monkeypatch.syspath_prepend(tmp_path / "pump-numpy")
    names: dict[str, object] = {}
    exec(compile(code, "cli.md", "exec"), names)
    assert names["p"].mean.shape == (1, 2)


def test_commands_of_the_readme_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
