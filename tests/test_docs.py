"""What the README and the pages show must run."""

import ast
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import docstrings
import pytest
import typer
from typer.testing import CliRunner

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.cli import app

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], key=str)
NOTEBOOKS = sorted(ROOT.glob("docs/learn/*.py"))
APART = ("cli.md", "control.md")  # pages whose blocks run with more checks: below, and in test_benchmarks.py


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def quick(*args: Any, **parameters: Any) -> BLLRegressor:
    """A page's code is tried, not its patience."""
    parameters["max_epochs"] = min(parameters.get("max_epochs", 8), 8)
    if not parameters.keys() & {"backbone", "preset"}:
        parameters = {"n_members": 2, "hidden_prior": 0.3} | parameters
    return BLLRegressor(*args, **parameters)


@pytest.fixture
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lastlayer, "BLLRegressor", quick)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(code: str, page: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, name_of(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in APART and blocks(p, "python")], ids=name_of)
def test_the_code_of_a_page_runs(page, in_a_folder_of_its_own):
    """All blocks of a page in one namespace, one after the other."""
    code = "\n".join(blocks(page, "python"))
    names = run(re.sub(r"(for epoch in range\(|epochs=)\d+", r"\g<1>2", code), page)
    if page.name == "README.md":
        assert (in_a_folder_of_its_own / "model.lastlayer").exists()
        assert names["mean"].shape == names["std"].shape == (160,)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_run(notebook, in_a_folder_of_its_own):
    import matplotlib.pyplot as plt
    import torch

    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with plt.rc_context({"backend": "agg"}):
        names = run(notebook.read_text(), notebook)
        plt.close("all")
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    if notebook.stem == "tutorial":
        assert names["tuned"].lpd > names["tuned"].lpd_before
        assert names["curve"][-1] < names["curve"][0]


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=name_of)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]+)(#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            aim = page.parent / target
            assert aim.exists(), f"{page.name} links to {target}"
            headings = re.findall(r"^#+ (.*)$", aim.read_text(), flags=re.M) if anchor else []
            anchors = {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, f"{page.name} links to {target}{anchor}"


@pytest.mark.parametrize("page", [p for p in PAGES if "literalinclude" in p.read_text()], ids=name_of)
def test_a_theorem_shows_tests_that_are_there(page):
    shown = re.findall(r"```\{literalinclude\} (\S+)\n:language: python\n:pyobject: (\w+)\n```", page.read_text())
    assert len(shown) == page.read_text().count("literalinclude")
    for path, name in shown:
        tree = ast.parse((page.parent / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}: {name}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=name_of)
def test_commands_of_the_pages_are_there(page):
    """Targets of the Makefile, extras, files, and commands with options that exist."""
    group = typer.main.get_command(app)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in "".join(blocks(page, "sh")).splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert_target(words[0])
        elif program == "lastlayer":
            with group.make_context("lastlayer", list(words)) as context:
                command = group.get_command(context, words[0])
                assert command is not None, line
                command.make_context(words[0], words[1:], parent=context)
        elif program == "pip":
            for named in re.findall(r"\[(.*?)\]", line):
                assert set(named.split(",")) <= extras.keys(), line
        elif program == "python" and words[0] == "-m":
            assert find_spec(words[1]) is not None, line
        elif program == "python":
            assert (ROOT / words[0]).exists(), line


def test_targets_and_modules_named_in_the_texts_are_there():
    for page in [*PAGES, ROOT / "Makefile"]:
        text = page.read_text()
        for target in re.findall(r"`make\s+(?!bench-NAME)([a-z][a-z0-9_-]*)", text) if page.suffix else []:
            assert_target(target)
        for module in set(re.findall(r"python -m (benchmarks[\w.]*\w)", text)) - {"benchmarks.NAME"}:
            assert find_spec(module) is not None, f"{page.name}: {module}"
        if page.name not in ("CHANGELOG.md", "Makefile"):  # the changelog names what is gone
            for name in set(re.findall(r"`(lastlayer(?:\.\w+)+)", text)) - {"lastlayer.md"}:
                assert docstrings.resolved(name) is not None, f"{page.name}: {name}"


def test_the_table_of_symbols_names_what_is_there():
    rows = re.findall(r"^\| .* \| .* \| (.*`.*) \| (.*) \|$", (ROOT / "docs/theory/symbols.md").read_text(), flags=re.M)
    assert len(rows) > 20
    for names, modules in rows:
        homes = re.findall(r"`([\w.]+)`", modules)
        sources = "\n".join(source_of(f"lastlayer.{home}") for home in homes) if homes else source_of("lastlayer")
        for name in re.findall(r"`\.?(\w+)", names):
            assert re.search(rf"\b{name}\b", sources), f"{name} is not in {modules}"


def source_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None, module
    folders = spec.submodule_search_locations
    files = [file for folder in folders for file in Path(folder).rglob("*.py")] if folders else [Path(str(spec.origin))]
    return "\n".join(file.read_text() for file in files)


def assert_target(name: str) -> None:
    kind, _, module = name.partition("-")
    package = {"bench": "benchmarks", "study": "benchmarks.control_studies"}.get(kind)
    if package and module not in ("", "20"):
        assert find_spec(f"{package}.{module}") is not None, name
    else:
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), flags=re.M), name


def test_the_commands_of_the_cli_page_run_as_typed(in_a_folder_of_its_own, monkeypatch):
    page, folder = ROOT / "docs" / "cli.md", in_a_folder_of_its_own
    commands = "".join(blocks(page, "sh")).splitlines()
    assert len(commands) == 8
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "lastlayer"
        short = ["--max-epochs", "5", "--members", "2"] if words[0] == "fit" else []
        done = CliRunner().invoke(app, [*words, *short])
        assert done.exit_code == 0, done.output
    for name in ("pump.lastlayer", "pump_new.predicted.csv", "pump.report.html", "pump-numpy", "pump.onnx"):
        assert (folder / name).exists()
        assert name in page.read_text()
    assert (folder / "updated.lastlayer").exists()
    (code,) = blocks(page, "python")
    monkeypatch.syspath_prepend(folder / "pump-numpy")
    assert run(code, page)["p"].mean.shape == (1, 2)


def test_the_page_of_a_run_shows_the_commands_of_its_script():
    """In their order, each with what it printed; the script is the only way to write the page."""
    from benchmarks.terminal import HEAD, STEPS, shown

    page = (ROOT / "docs" / "learn" / "terminal.md").read_text()
    assert page.startswith(HEAD)
    printed = blocks(ROOT / "docs" / "learn" / "terminal.md", "text")
    assert [block.splitlines()[0] for block in printed] == [f"$ {command}" for _, _, command in STEPS]
    assert all(len(block.splitlines()) > 4 for block in printed)
    assert shown("a \n\nThe model\nsettings") == "a\n\n..."
