"""Progress bars: drawn by tqdm at a terminal; elsewhere, such as in a log file, at most one line per minute."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS_PER_LINE = 60.0


class _Log:
    """Output of tqdm without a terminal: one line per minute for all bars together, the first after a minute."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._last = time.monotonic()

    def write(self, text: str) -> None:
        line, now = text.strip(), time.monotonic()
        if line and now - self._last >= SECONDS_PER_LINE:
            self._last = now
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


_log: _Log | None = None


def at_terminal() -> bool:
    """Whether somebody watches stderr; without one, bars go nowhere anyway."""
    return sys.stderr is None or sys.stderr.isatty()


def progress_bar(*args: Any, **options: Any) -> Any:
    global _log
    if options.get("disable") or at_terminal():
        return tqdm(*args, mininterval=0.5, **options)
    _log = _log or _Log()
    return tqdm(*args, mininterval=1.0, file=_log, ncols=80, **options)
