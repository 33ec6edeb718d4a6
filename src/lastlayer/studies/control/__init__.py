"""Studies of learned dynamics: `python -m lastlayer.studies.control.spring`, `...control.mpc`."""
