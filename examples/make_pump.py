"""Makes the example tables: `python examples/make_pump.py` writes pump.csv and pump_new.csv next to itself.

A centrifugal pump by its affinity laws: head and shaft power from flow, speed, temperature and fluid, with measurement
noise. The new rows contain some from a pump that runs up to 25% faster and 30 degrees hotter than any in pump.csv.
"""

import csv
from pathlib import Path

import numpy as np

DENSITY = {"water": 1000.0, "glycol": 1080.0, "oil": 870.0}
VISCOSITY = {"water": 1.0, "glycol": 6.0, "oil": 30.0}
"""Viscosity at 20 degrees Celsius, in millipascal seconds."""
COLUMNS = ("flow_m3h", "speed_rpm", "temperature_c", "fluid", "head_m", "power_kw")


def rows(m: int, rng: np.random.Generator, *, fastest: float = 2900.0, hottest: float = 60.0) -> list[list[str]]:
    speed, temperature = rng.uniform(1400.0, fastest, m), rng.uniform(10, hottest, m)
    fluid = rng.choice(list(DENSITY), m, p=[0.6, 0.25, 0.15])
    flow = rng.uniform(0.2, 1.1, m) * 80 * speed / 2900
    density = np.array([DENSITY[name] for name in fluid]) * (1 - 4e-4 * (temperature - 20))
    viscosity = np.array([VISCOSITY[name] for name in fluid]) * np.exp(-0.025 * (temperature - 20))
    ratio, share = speed / 2900, flow / (80 * speed / 2900)
    drag = 1 - 0.02 * np.log(viscosity).clip(min=0)
    head = drag * (52 * ratio**2 - 16 * ratio**2 * share**2) + 0.4 * rng.standard_normal(m)
    efficiency = drag * (0.32 + 0.9 * share - 0.48 * share**2)
    power = density * 9.81 * flow / 3600 * head.clip(min=1) / efficiency / 1000 + 0.05 * rng.standard_normal(m)
    numbers = zip(flow, speed, temperature, head, power, strict=True)
    return [
        [f"{q:.2f}", f"{n:.0f}", f"{t:.1f}", str(name), f"{h:.2f}", f"{p:.3f}"]
        for (q, n, t, h, p), name in zip(numbers, fluid, strict=True)
    ]


def write(path: Path, lines: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)


def main(folder: Path = Path(__file__).parent) -> None:
    rng = np.random.default_rng(7)
    write(folder / "pump.csv", rows(400, rng))
    write(folder / "pump_new.csv", rows(120, rng) + rows(40, rng, fastest=3600.0, hottest=90.0))


if __name__ == "__main__":
    main()
