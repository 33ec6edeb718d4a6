"""Page with a terminal session: `python -m benchmarks.terminal` writes docs/learn/terminal.md.

It runs the commands and records their output, draws docs/explain.png and, if Chromium is installed, docs/report.png.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # which matplotlib brings

ROOT = Path(__file__).parents[1]
WIDTH = 100
COLORS = 64  # palette size: enough for figures of lines and text, at a third of the file size
STEPS = (
    (
        "Fit",
        "Lists the columns, the scores on held-out rows, and the inputs that predictions depend on.",
        "lastlayer fit examples/pump.csv --target head_m,power_kw",
    ),
    (
        "Predict",
        "Predicts new rows, each with mean, standard deviation, interval and degree of extrapolation.",
        "lastlayer predict pump.lastlayer examples/pump_new.csv",
    ),
    (
        "Evaluate",
        "Scores the predictions; the new rows contain the true values.",
        "lastlayer evaluate pump.lastlayer examples/pump_new.csv",
    ),
    (
        "Explain",
        "Reports which inputs matter and how predictions vary with each of them; a model card and the settings follow.",
        "lastlayer explain pump.lastlayer --data examples/pump_new.csv --dependence explain.png",
    ),
    (
        "Report",
        "Writes everything to one HTML page that opens offline.",
        "lastlayer report pump.lastlayer examples/pump_new.csv --group fluid",
    ),
)
END_OF_EXPLAIN = "The model"
HEAD = """# A terminal session

Output of the commands, from a table to a report: `make bench-terminal` runs them and writes this page. The pump and its
table are those of [From a table to a report](../cli.md). Progress bars, and the output of `explain` below its second
table, are omitted.
"""
PICTURE = "\n![Predictions as each input varies, with bands](../explain.png)\n"


def run(command: str, folder: Path) -> str:
    """Run a command and return its output on a terminal of that width, without progress bars."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    program, *words = shlex.split(command)
    assert program == "lastlayer"
    done = subprocess.run(
        [sys.executable, "-m", "lastlayer", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr}")
    return done.stdout


def shown(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines()]
    if END_OF_EXPLAIN in lines:
        lines = [*lines[: lines.index(END_OF_EXPLAIN)], "..."]
    return "\n".join(lines).strip()


def screenshot(page: Path, out: Path) -> None:
    """Take a screenshot of the top of a page at desktop width."""
    if (browser := shutil.which("chromium")) is None:
        print("Chromium is not installed: docs/report.png is left unchanged")
        return
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    size = ["--window-size=1150,1180", f"--screenshot={out}"]
    subprocess.run([browser, *flags, *size, page.as_uri()], check=True, capture_output=True)


def main(docs: Path = ROOT / "docs") -> None:
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        for title, words, command in STEPS:
            parts.append(f"\n## {title}\n\n{words}\n\n```text\n$ {command}\n{shown(run(command, folder))}\n```\n")
            if title == "Explain":
                parts.append(PICTURE)
        screenshot(folder / "pump.report.html", folder / "report.png")
        for picture in sorted(folder.glob("*.png")):
            Image.open(picture).quantize(COLORS).save(docs / picture.name, optimize=True)
    (docs / "learn" / "terminal.md").write_text("".join(parts))


if __name__ == "__main__":
    main()
