"""Studies of learned dynamics: `python -m benchmarks.control_studies.spring` and `...control_studies.mpc`."""
