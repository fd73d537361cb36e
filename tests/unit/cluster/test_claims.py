"""An attempt has one claimant."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre_core.cluster.claims import claim
from gyre_core.storage import open_storage

REQUEST = "00000003-0001"


def test_the_first_has_it_and_may_ask_again(tmp_path):
    storage = open_storage(tmp_path)
    assert claim(storage, REQUEST, 1, "a")
    assert not claim(storage, REQUEST, 1, "b")
    assert claim(storage, REQUEST, 1, "a")
    assert claim(storage, REQUEST, 2, "b")


@pytest.mark.parametrize("round_", range(10))
def test_of_eight_at_once_one_has_it(tmp_path, round_):
    storage = open_storage(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda number: claim(storage, REQUEST, round_, f"worker {number}"), range(8)))
    assert sum(won) == 1
