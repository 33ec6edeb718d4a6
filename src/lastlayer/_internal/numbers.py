"""Constants of float64."""

import math

import torch

EPS = torch.finfo(torch.float64).eps
TINY = math.sqrt(torch.finfo(torch.float64).tiny)
"""A positive number whose inverse can be squared without overflow."""
