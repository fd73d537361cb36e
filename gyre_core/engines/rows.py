"""The sequences in flight, as columns: one array for each of their properties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gyre_core.engines.streams import Job


class RowTable:
    """Properties of the sequences in flight; row r of every array belongs to sequence r."""

    def __init__(self, rows: int) -> None:
        self.jobs: NDArray[np.object_] = np.empty(rows, dtype=object)
        """The `Job` of each sequence."""
        self.group_keys = np.zeros(rows, dtype=np.uint64)
        self.sample_indices = np.zeros(rows, dtype=np.int64)
        self.settings = np.zeros(rows, dtype=np.int64)
        """Which of the sampling parameters in use each sequence has."""
        self.prompt_lengths = np.zeros(rows, dtype=np.int64)
        self.limits = np.zeros(rows, dtype=np.int64)
        """Completion tokens at the most."""
        self.started_at = np.zeros(rows, dtype=np.float64)
        self.lengths = np.zeros(rows, dtype=np.int64)
        """Completion tokens so far."""
        self.token_ids = np.zeros((rows, 0), dtype=np.int32)
        """`[rows, time]`"""
        self.log_probabilities = np.zeros((rows, 0), dtype=np.float32)
        """`[rows, time]`"""

    def reserve(self, time: int) -> None:
        """Hold completions of at least `time` tokens."""
        missing = time - self.token_ids.shape[1]
        if missing > 0:
            self.token_ids = np.pad(self.token_ids, ((0, 0), (0, missing)))
            self.log_probabilities = np.pad(self.log_probabilities, ((0, 0), (0, missing)))

    def append_tokens(
        self, rows: NDArray[np.int64], token_ids: NDArray[np.int64], log_probabilities: NDArray[np.float32]
    ) -> None:
        """Add one token to each of `rows`."""
        self.token_ids[rows, self.lengths[rows]] = token_ids
        self.log_probabilities[rows, self.lengths[rows]] = log_probabilities
        self.lengths[rows] += 1

    def newest_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """The newest token of each of `rows`."""
        return self.token_ids[rows, self.lengths[rows] - 1]

    def completion(self, row: int) -> NDArray[np.int32]:
        """The tokens so far of one row, `[time]`; a view."""
        return self.token_ids[row, : self.lengths[row]]

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy the rows `sources` to the rows `targets`."""
        for column in vars(self).values():
            column[targets] = column[sources]

    def job(self, row: int) -> Job:
        """The job of one row."""
        job = self.jobs[row]
        assert isinstance(job, Job)
        return job
