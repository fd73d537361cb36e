"""A request is admitted once, and a closed one never."""

import json

import pytest

from gyre_core.experience.ledger import AdmissionLedger
from gyre_core.storage import open_storage


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def test_an_entry_is_durable_before_it_counts(storage):
    ledger = AdmissionLedger(storage, epoch=3)
    assert not ledger.settled("00000007-0001")
    ledger.record("00000007-0001", step=8)
    assert ledger.settled("00000007-0001")
    assert json.loads(storage.read("learner/0003/admit-00000007-0001.json")) == {
        "request_id": "00000007-0001",
        "step": 8,
    }


def test_an_entry_left_by_a_failed_try_is_taken_over(storage):
    storage.create("learner/0001/admit-00000007-0001.json", b'{"request_id": "00000007-0001", "step": 7}')
    ledger = AdmissionLedger(storage, epoch=1)
    ledger.record("00000007-0001", step=8)
    assert ledger.admitted == ["00000007-0001"]


def test_closed_steps_settle_everything_of_theirs_for_good(storage):
    ledger = AdmissionLedger(storage, epoch=1, admitted=["00000001-0000", "00000003-0000"])
    ledger.close(before_step=3)
    ledger.close(before_step=2)
    assert ledger.watermark == 3
    assert ledger.admitted == ["00000003-0000"]
    assert ledger.settled("00000002-0009")
    assert not ledger.settled("00000003-0001")


def test_the_ledger_goes_on_from_what_was_restored(storage):
    ledger = AdmissionLedger(storage, epoch=2, watermark=5, admitted=["00000005-0000"])
    assert [ledger.settled(name) for name in ("00000004-0000", "00000005-0000", "00000005-0001")] == [True, True, False]
