"""Studies of learned dynamics: `python -m benchmarks.control_studies.spring`, `...control_studies.mpc`."""
