"""What the README shows must run."""

import re
from functools import partial
from pathlib import Path

import pytest

import lastlayer
from lastlayer import BLLRegressor

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


def test_commands_of_the_readme_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
