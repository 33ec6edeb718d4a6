"""Models in the languages of others: CasADi expressions and do-mpc controllers. They need `pip install
lastlayer[control]`; importing this room needs nothing, calling it says what is missing."""

from lastlayer.integrations.casadi import to_casadi

__all__ = ["to_casadi"]
