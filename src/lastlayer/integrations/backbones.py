"""Networks of the user's in CasADi: by way of ONNX, which CasADi reads into an expression."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lastlayer.errors import InputError
from lastlayer.integrations.extras import need
from lastlayer.integrations.onnx import first_line, onnx_program

if TYPE_CHECKING:
    import casadi

CLOSE = 1e-5
"""ONNX keeps some constants of float64 graphs in float32: an expression off by more than this is another one."""


def casadi_function(ca: Any, network: nn.Module, n_inputs: int) -> "casadi.Function":
    """(1, d) -> (1, k): the network as an MX function, compared with the network itself at a few points."""
    need("onnxscript", extra="control")
    dtype = next((p.dtype for p in network.parameters()), torch.float64)
    Z = torch.randn(5, n_inputs, dtype=dtype, generator=torch.Generator().manual_seed(0))
    kind = type(network).__name__
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "backbone.onnx")
        try:
            onnx_program(network, Z[:1]).save(path)
            function = ca.GraphBuilder(path).create("backbone", {"symbolic": True})
            found = np.vstack([np.array(function(row[None])) for row in Z.double().numpy()])
        except Exception as error:  # torch and CasADi raise of many kinds: all mean that this network does not pass
            raise InputError(
                f"the backbone ({kind}) could not be read by CasADi through ONNX: {first_line(error)}. Known to work: "
                "linear layers, elementwise functions and batch normalisation; known to fail: convolutions, layer "
                "normalisation and recurrent cells. Take such layers, or hidden=... for the built-in network"
            ) from error
    with torch.no_grad():
        wanted = network.eval()(Z).double().numpy()
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=CLOSE, atol=CLOSE * np.abs(wanted).max()):
        raise InputError(f"CasADi read the backbone ({kind}) from ONNX as another function; give hidden=... instead")
    return function
