"""How samples grow old: weighed down on the way, stale in the second half of the window, dropped at its end.

All functions take arrays over groups, `[groups]`, in any order; ages and windows are seconds on the pool's clock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DECAYS_PER_WINDOW = 3.0
"""The weight falls by a factor e this often within the window, to 5% at its end."""
STALE_SHARE_OF_WINDOW = 0.5
"""A sample counts as stale from this share of the window on."""


def ages(admitted_at: NDArray[np.float64], now: float) -> NDArray[np.float64]:
    """Seconds since admission; a clock that was set back makes nothing younger than new."""
    return np.maximum(now - admitted_at, 0.0)


def staleness_weights(age: NDArray[np.float64], time_window: float) -> NDArray[np.float64]:
    """exp(-age / τ), the factor of a group's priority, with τ a third of the window."""
    return np.exp(age * (-DECAYS_PER_WINDOW / time_window))


def expired(age: NDArray[np.float64], time_window: float) -> NDArray[np.bool_]:
    """Which groups are older than the window."""
    return age > time_window


def evicted(admitted_at: NDArray[np.float64], samples: NDArray[np.int32], buffer_size: int) -> NDArray[np.bool_]:
    """Which groups must leave so that at most `buffer_size` samples stay: the oldest, and no more than needed.

    Of groups admitted at the same time, the one that comes first in the arrays is the older.
    """
    newest_first = np.argsort(admitted_at, kind="stable")[::-1]
    leave = np.zeros(len(samples), dtype=np.bool_)
    leave[newest_first] = np.cumsum(samples[newest_first], dtype=np.int64) > buffer_size
    return leave


def stale_share(age: NDArray[np.float64], samples: NDArray[np.int32], time_window: float) -> float:
    """Share of the samples that are in the second half of the window; 0 for an empty pool."""
    total = int(samples.sum())
    return float(samples[age > STALE_SHARE_OF_WINDOW * time_window].sum()) / total if total else 0.0
