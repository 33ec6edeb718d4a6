"""The circumstances of a fit: threads, log lines, progress bars and checkpoints."""

import logging
import math
import numbers
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from joblib import cpu_count
from threadpoolctl import threadpool_limits
from torch import nn

from lastlayer._internal.digests import digest_of, digest_of_parameters, layout_of, name_of
from lastlayer._internal.work import progress_bar, threads, threads_for
from lastlayer.data.distributed import ProcessGroup
from lastlayer.errors import InputError
from lastlayer.networks.architecture import Architecture
from lastlayer.settings.types import Settings, TrainingOptions
from lastlayer.training import Checkpoint, Optimizer, Problem, TrainingHistory, clear_checkpoints, train

LOGGER = logging.getLogger("lastlayer")
LEVELS = {1: logging.INFO, 2: logging.DEBUG}
logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One fit: its progress bars and checkpoints, and its training history."""

    progress: bool = False
    checkpoint: Any = None
    """Folder for the state of training."""
    digest: str = ""
    """Digest of the data, stored in the checkpoints."""
    history: TrainingHistory = field(default_factory=TrainingHistory)
    """History of an interrupted training, or else of the longest; of equals the first, whatever threads did."""
    rank: tuple[int, ...] = ()
    """By which this history was preferred to others."""
    lock: Lock = field(default_factory=Lock)

    @contextmanager
    def stage(self, label: str, work: int = 0) -> Iterator[None]:
        """Show and time a stage of so many multiplications; small ones use one thread."""
        start, shown = time.perf_counter(), {"desc": label, "bar_format": "{desc}: {elapsed}", "leave": False}
        with progress_bar(total=1, disable=not self.progress, **shown), threads_for(work):
            yield
        logger.info("%s: %.1f s", label, time.perf_counter() - start)

    def train(
        self,
        problem: Problem,
        settings: Settings,
        *,
        place: tuple[int, int] = (1, 0),
        most: int | None = None,
        **options: Any,
    ) -> TrainingHistory:
        """Train a problem by the optimizer of the settings, for at most `most` epochs, and keep the history."""
        optimizer = Optimizer(settings.training.learning_rate, settings.training.max_epochs if most is None else most)
        history = train(problem, optimizer, **{"progress": self.progress} | options)
        rank = (history.stopped == "interrupted", len(history.nlml), -place[0], -place[1])
        with self.lock:
            if rank > self.rank:
                self.rank, self.history = rank, history
        nlml = history.nlml[-1] if history.nlml else math.nan
        logger.debug("a training ended by %s, %d epochs, NLML %.4g", history.stopped, len(history.nlml), nlml)
        return history

    def state(
        self, name: str, architecture: Architecture, network: nn.Module, prior_precisions: Any, data: dict[str, Any]
    ) -> Checkpoint | None:
        """Checkpoint of a new training, identified by all settings but the device, the user's network, and the data."""
        if self.checkpoint is None:
            return None
        folder, backbone = Path(self.checkpoint), architecture.backbone
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint={str(folder)!r} must be a folder, or a path where one can be made") from error
        content = architecture.settings.identity()
        content["backbone"] = None if backbone is None else digest_of(layout_of(network))
        if isinstance(backbone, nn.Module):
            content["backbone"] += f", weights {digest_of_parameters(network)}"
        elif backbone is not None:
            content["backbone"] += f", made by {name_of(backbone)}"
        content |= {"hidden_prior": prior_precisions, "data": data}
        return Checkpoint(folder / f"{name}.safetensors", content, draws=backbone is not None)


@contextmanager
def running(n_jobs: Any, verbose: Any, progress: bool, training: TrainingOptions | None) -> Iterator[Run]:
    """Context of a fit, by the parameters of an estimator."""
    whole = lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if n_jobs is not None and not (whole(n_jobs) and n_jobs):
        raise InputError(f"n_jobs={n_jobs!r} must be None, a number of threads, or -1 for all cores")
    if verbose not in (True, False) and not (whole(verbose) and verbose >= 0):
        raise InputError(f"verbose={verbose!r} must be 0, 1 for the stages of a fit, or 2 for details")
    checkpoint = None if training is None else training.checkpoint
    with nullcontext() if n_jobs is None else limited(n_jobs), shown(verbose) if verbose else nullcontext():
        yield Run(progress, checkpoint)
    if checkpoint is not None and not ProcessGroup.current().rank:
        clear_checkpoints(Path(checkpoint))


@contextmanager
def limited(n_jobs: int) -> Iterator[None]:
    """Context in which torch, BLAS and OpenMP use `n_jobs` threads."""
    n = n_jobs if n_jobs > 0 else max(1, cpu_count() + 1 + n_jobs)
    with threadpool_limits(n), threads(n):
        yield


@contextmanager
def shown(verbose: int) -> Iterator[None]:
    """Context in which the logger "lastlayer" passes info (1) or debug lines (2), to stderr if it has no handler."""
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
