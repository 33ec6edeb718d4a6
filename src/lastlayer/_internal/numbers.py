"""Constants of float64."""

import math

import torch

LOG_2PI = math.log(2 * math.pi)
EPS = torch.finfo(torch.float64).eps
TINY = math.sqrt(torch.finfo(torch.float64).tiny)
"""A positive number whose inverse can be squared without overflow."""
