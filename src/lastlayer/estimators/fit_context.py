"""The context of a fit: the number of threads (`n_jobs`) and the log lines shown (`verbose`)."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from joblib import cpu_count
from threadpoolctl import threadpool_limits

from lastlayer.settings.parameters import check_running

LOGGER = logging.getLogger("lastlayer")
LEVELS = {1: logging.INFO, 2: logging.DEBUG}


@runtime_checkable
class Running(Protocol):
    """Parameters of an estimator that control how a fit runs."""

    n_jobs: int | None
    verbose: int


P = ParamSpec("P")
Estimator = TypeVar("Estimator", bound=Running)
Result = TypeVar("Result")


def in_fit_context(method: Callable[Concatenate[Estimator, P], Result]) -> Callable[Concatenate[Estimator, P], Result]:
    """Decorate a fitting method so that it runs with `n_jobs` threads and shows the log lines of `verbose`."""

    @wraps(method)
    def within(self: Estimator, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        check_running(self.n_jobs, self.verbose)
        with threads(self.n_jobs), shown(self.verbose):
            return method(self, *args, **kwargs)

    return within


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Context in which torch, BLAS and OpenMP use `n_jobs` threads; None changes nothing."""
    if n_jobs is None:
        yield
        return
    n = n_jobs if n_jobs > 0 else max(1, cpu_count() + 1 + n_jobs)
    before = torch.get_num_threads()
    with threadpool_limits(n):
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def shown(verbose: int) -> Iterator[None]:
    """Context in which the logger "lastlayer" passes info (1) or debug lines (2), to stderr if it has no handler."""
    if not verbose:
        yield
        return
    level, before = LEVELS[min(verbose, max(LEVELS))], LOGGER.level
    with ExitStack() as undo:
        undo.callback(LOGGER.setLevel, before)
        LOGGER.setLevel(level)
        if not LOGGER.hasHandlers():
            handler: Any = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("lastlayer: %(message)s"))
            LOGGER.addHandler(handler)
            undo.callback(LOGGER.removeHandler, handler)
        yield
