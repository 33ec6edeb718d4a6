"""Rows per second and memory of `lastlayer predict` on a large CSV, compared with the bare networks in memory.

A single network and the default mixture predict a table like the example. "Bare network" is the forward pass of the
same networks alone, on numeric inputs in memory. Memory is the peak of the predicting process, also for a tenth of the
rows: it must not grow with the table. Rows are counted per processor second and per second of wall time.
"""

import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import in_own_process, options_of
from benchmarks.timing import describe_machine, memory
from lastlayer._internal.work import row_chunks
from lastlayer.cli import app
from lastlayer.tables import TableFile, TableRegressor, read

ROOT = Path(__file__).parents[1]


def make_table(path: Path, rows: int) -> None:
    """Write the example's rows repeatedly; their values do not affect the cost."""
    head, *lines = (ROOT / "examples" / "pump.csv").read_text().splitlines(keepends=True)
    with path.open("w") as file:
        file.write(head)
        for start in range(0, rows, len(lines)):
            file.writelines(lines[: rows - start])


def bare_seconds(fitted: TableRegressor, path: Path) -> float:
    """Processor seconds of the forward pass of every network over all rows, chunk by chunk."""
    seconds = 0.0
    with torch.no_grad():
        for table in TableFile(path).chunks():
            Z = torch.from_numpy(fitted.schema_.encode(table).X)
            Z = (Z - Z.mean(0)) / Z.std(0)
            start = time.process_time()
            for part in row_chunks(len(Z)):
                for member in fitted.members_:
                    member.network(Z[part])
            seconds += time.process_time() - start
    return seconds


def predict(model: Path, data: Path, out: Path) -> dict[str, Any]:
    """Output of the command, processor seconds and peak memory in MiB of this process."""
    words = ["predict", str(model), str(data), "--out", str(out), "--json"]
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        app(words, standalone_mode=False)
    cpu = time.process_time() - start
    return json.loads(said.getvalue().splitlines()[-1]) | {"cpu": cpu, "memory": memory("VmHWM")}


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    rows = parser.parse_args(arguments).rows
    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small = folder / "large.csv", folder / "small.csv"
        make_table(large, rows)
        make_table(small, rows // 10)
        print(f"{rows:,} rows, {large.stat().st_size / 2**20:.0f} MiB of CSV\n")
        head = f"{'':28} {'rows':>8} {'bare network':>14} {'ratio':>6}"
        print(f"{head}      wall time   peak memory (a tenth of the rows)")
        table = read(ROOT / "examples" / "pump.csv")
        for preset in ("evidence", "calibrated"):
            model = TableRegressor(preset=preset, max_epochs=50, random_state=0)
            fitted = model.fit(table, target=["head_m", "power_kw"])
            fitted.save(folder / "model")
            part, whole = (
                in_own_process(predict, folder / "model", data, folder / "out.csv") for data in (small, large)
            )
            bare = rows // 10 / bare_seconds(fitted, small)
            pace, clock = rows / whole["cpu"], rows / whole["seconds"]
            label = f"{preset}, {len(fitted.members_)} network(s)"
            memory = f"{whole['memory']:.0f} MiB ({part['memory']:.0f} MiB)"
            print(f"{label:28} {pace:8,.0f} {bare:14,.0f} {bare / pace:6.1f} {clock:14,.0f}   {memory}", flush=True)


if __name__ == "__main__":
    main()
