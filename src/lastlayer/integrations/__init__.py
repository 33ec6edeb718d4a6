"""Models in other languages: CasADi expressions, C source, do-mpc controllers (`pip install lastlayer[control]`)."""

from lastlayer.integrations.c_code import export_c
from lastlayer.integrations.casadi import functional_to_casadi, to_casadi, variances_to_casadi
from lastlayer.integrations.do_mpc import (
    Controller,
    chance_constraint,
    to_do_mpc,
    trust_constraint,
    trust_cost,
    trust_limit,
)

__all__ = [
    "Controller",
    "chance_constraint",
    "export_c",
    "functional_to_casadi",
    "to_casadi",
    "to_do_mpc",
    "trust_constraint",
    "trust_cost",
    "trust_limit",
    "variances_to_casadi",
]
