"""One thread for all tests: toy models gain nothing by more, and on a busy machine two threads wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch is imported, and for the processes that tests start.
