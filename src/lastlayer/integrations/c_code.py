"""A fitted model as one file of C source: mean, variances, affine cost and their Jacobians, for any C compiler."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastlayer._internal.files import replacing
from lastlayer.errors import InputError, need
from lastlayer.integrations.casadi import variances_to_casadi

if TYPE_CHECKING:
    import casadi

PRODUCT = """
/* C += op(A) op(B), the product that the functions above call in place of a BLAS; alpha and beta are one. The loop over
   rows is innermost, so that a compiler turns it into vector instructions without reordering any sum. */
void NAME_dgemm(const char* transa, const char* transb, const int* m, const int* n, const int* k, const double* alpha,
                const double* A, const int* lda, const double* B, const int* ldb, const double* beta, double* C,
                const int* ldc) {
  const int down = *transa == 'N' ? 1 : *lda, across = *transa == 'N' ? *lda : 1;
  const int next = *transb == 'N' ? 1 : *ldb, column = *transb == 'N' ? *ldb : 1;
  int i, j, l;
  (void) alpha;
  (void) beta;
  for (j = 0; j < *n; ++j) {
    double* restrict c = C + (long) j * *ldc;
    l = 0;
    if (down == 1) {
      for (; l + 3 < *k; l += 4) { /* four at a time: C is read and written a quarter as often */
        const double* restrict a = A + (long) l * across;
        const double* b = B + (long) l * next + (long) j * column;
        const double b0 = b[0], b1 = b[next], b2 = b[2 * next], b3 = b[3 * next];
        for (i = 0; i < *m; ++i)
          c[i] = (((c[i] + a[i] * b0) + a[i + across] * b1) + a[i + 2 * across] * b2) + a[i + 3 * across] * b3;
      }
    }
    for (; l < *k; ++l) {
      const double* restrict a = A + (long) l * across;
      const double b = B[(long) l * next + (long) j * column];
      if (down == 1) {
        for (i = 0; i < *m; ++i) c[i] += a[i] * b;
      } else {
        for (i = 0; i < *m; ++i) c[i] += a[(long) i * down] * b;
      }
    }
  }
}
"""


def export_c(model: Any, path: str | os.PathLike[str], *, name: str | None = None) -> Path:
    """Write C99 source that depends only on the standard mathematics library.

    The file has two functions in CasADi's calling convention, in original units and float64::

        NAME      x (d) -> mean (q), epistemic_var (q), noise_var (q), affine_cost (1)
        jac_NAME  x, and the four outputs (ignored) -> their Jacobians, (q, d) or (1, d), column by column

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`.
    path : str or path
        The file to write, such as "pump.c".
    name : str, default None
        Name of the functions. None: the name of the file without its suffix.
    """
    need("casadi", extra="control")
    path = Path(path)
    name = path.stem if name is None else name
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) or "__" in name:
        raise InputError(
            f"{name!r} cannot name a CasADi C function: give name=... of letters, digits and single underscores"
        )
    function = variances_to_casadi(model, name=name, blas="classic")
    with replacing(path) as file:
        file.write(c_source(name, function, function.jacobian()).encode())
    return path


def c_source(name: str, *functions: "casadi.Function") -> str:
    """Generate the C source of CasADi functions, together with the matrix product that they call."""
    ca = need("casadi", extra="control")
    generator = ca.CodeGenerator(f"{name}.c")
    for function in functions:
        generator.add(function)
    return f"#define CASADI_BLAS_DGEMM {name}_dgemm\n{generator.dump()}{PRODUCT.replace('NAME', name)}"
