"""Factors of matrices that are hardly positive definite."""

import torch
from helpers import close

from lastlayer.bayes.linalg import Cholesky


def test_a_pivot_of_zero_spoils_its_own_matrix_alone():
    L = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 0.0, 2.0]))]).double()
    inverse = Cholesky(L).inverse()
    close(inverse[0], torch.eye(3).double())
    assert not torch.isfinite(inverse[1]).all()
