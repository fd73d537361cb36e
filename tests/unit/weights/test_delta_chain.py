"""Policy versions stored as differences: what is read for them, when one is whole, and what keeps what."""

import json

import pytest
import torch
from recorded_storage import RecordedStorage, StopError

from gyre_core.storage import LocalStorage
from gyre_core.types import PolicyVersion
from gyre_core.weights import chain as chain_module
from gyre_core.weights.chain import CorruptVersionError, VersionChain
from gyre_core.weights.flat import FlatWeights


@pytest.fixture(autouse=True)
def differences_at_any_size(monkeypatch):
    monkeypatch.setattr(chain_module, "LEAST_DELTA_BYTES", 0)


def version(number, epoch=1):
    return PolicyVersion(epoch, number)


def weights_of(number, share=0.01):
    """A model after so many steps, in each of which a share of the weights moved by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    patterns = (0.02 * torch.randn(200, 100, generator=generator)).bfloat16().view(torch.int16).clone()
    for _ in range(number):
        patterns += (torch.rand(200, 100, generator=generator) < share).to(torch.int16)
    return {"layer": patterns.view(torch.bfloat16), "frozen": torch.arange(5.0)}


def publish(chain, count, share=0.01):
    for number in range(count):
        parent = version(number - 1) if number else None
        chain.publish(version(number), parent, FlatWeights.of(weights_of(number, share)))


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


def test_versions_are_small_and_come_back_from_their_base(tmp_path):
    chain = VersionChain(LocalStorage(tmp_path))
    publish(chain, 5)
    manifests = [chain.manifest(version(number)) for number in range(5)]
    assert [manifest.kind for manifest in manifests] == ["full", "delta", "delta", "delta", "delta"]
    assert [manifest.chain for manifest in manifests] == [0, 1, 2, 3, 4]
    assert manifests[4].chain_size == sum(manifest.size for manifest in manifests[1:])
    assert all(manifest.size < 0.05 * manifests[0].size for manifest in manifests[1:])
    for number in (4, 2, 0, 3):
        assert equal(VersionChain(LocalStorage(tmp_path)).load(version(number)), weights_of(number))


def test_a_reader_takes_only_what_it_lacks(tmp_path):
    publish(VersionChain(LocalStorage(tmp_path)), 5)
    reader = VersionChain(LocalStorage(tmp_path))
    reader.load(version(2))
    (tmp_path / "policy" / str(version(0)) / "weights.safetensors").unlink()
    (tmp_path / "policy" / str(version(2)) / "delta.bin").unlink()
    assert equal(reader.load(version(4)), weights_of(4))
    with pytest.raises(FileNotFoundError):
        VersionChain(LocalStorage(tmp_path)).load(version(4))


def test_a_reader_leaves_an_abandoned_branch(tmp_path):
    """A learner died after version 3; its successor took over at version 1, and began its branch with a whole one."""
    publish(VersionChain(LocalStorage(tmp_path)), 4)
    reader = VersionChain(LocalStorage(tmp_path))
    reader.load(version(3))
    successor = VersionChain(LocalStorage(tmp_path))
    successor.publish(version(2, epoch=2), version(1), FlatWeights.of(weights_of(5)))
    successor.publish(version(3, epoch=2), version(2, epoch=2), FlatWeights.of(weights_of(6)))
    assert [successor.manifest(version(number, 2)).kind for number in (2, 3)] == ["full", "delta"]
    assert equal(reader.load(version(3, epoch=2)), weights_of(6))


def test_a_difference_that_is_damaged_names_the_version_that_it_breaks(tmp_path):
    publish(VersionChain(LocalStorage(tmp_path)), 4)
    file = tmp_path / "policy" / str(version(2)) / "delta.bin"
    file.write_bytes(file.read_bytes()[:-1])
    assert equal(VersionChain(LocalStorage(tmp_path)).load(version(1)), weights_of(1))
    for number in (2, 3):
        with pytest.raises(CorruptVersionError, match=str(version(2))):
            VersionChain(LocalStorage(tmp_path)).load(version(number))


def test_a_base_follows_when_the_differences_are_as_large_or_many(tmp_path, monkeypatch):
    chain = VersionChain(LocalStorage(tmp_path / "large"))
    publish(chain, 40, share=0.2)
    manifests = [chain.manifest(version(number)) for number in range(40)]
    bases = [number for number, manifest in enumerate(manifests) if manifest.kind == "full"]
    assert len(bases) > 2
    assert all(manifest.chain_size <= manifests[0].size for manifest in manifests)
    assert max(manifest.chain for manifest in manifests) == max(
        later - earlier - 1 for earlier, later in zip(bases, [*bases[1:], 40], strict=True)
    )
    monkeypatch.setattr(chain_module, "LONGEST_CHAIN", 3)
    chain = VersionChain(LocalStorage(tmp_path / "long"))
    publish(chain, 9)
    assert [chain.manifest(version(number)).chain for number in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_differences_that_gain_nothing_are_not_tried_again_for_a_while(tmp_path, monkeypatch):
    tried = []
    encode = chain_module.encode_weights

    def counted(*arguments):
        tried.append(len(tried))
        return encode(*arguments)

    monkeypatch.setattr(chain_module, "encode_weights", counted)
    chain = VersionChain(LocalStorage(tmp_path))
    generator = torch.Generator().manual_seed(0)
    for number in range(2 + chain_module.PAUSE + 1):
        chain.publish(
            version(number), version(number - 1), FlatWeights.of({"noise": torch.randn(1000, generator=generator)})
        )
        assert chain.manifest(version(number)).kind == "full"
    assert len(tried) == 2


def test_a_version_is_kept_for_those_that_are_based_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_module, "LONGEST_CHAIN", 3)

    def check(operation, name):
        for found in VersionChain(LocalStorage(tmp_path)).versions():
            if found >= version(newest - 1):
                VersionChain(LocalStorage(tmp_path)).load(found)

    newest = 0
    chain = VersionChain(RecordedStorage(tmp_path, check))
    kept = []
    for number in range(10):
        parent = version(number - 1) if number else None
        chain.publish(version(number), parent, FlatWeights.of(weights_of(number)))
        newest = number
        chain.retain(2)
        kept.append(chain.versions()[0].number)
    assert kept == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_keeping_a_long_chain_asks_for_no_more_than_is_kept(tmp_path, monkeypatch):
    chain = VersionChain(LocalStorage(tmp_path))
    publish(chain, 20)
    asked = []
    for method in ("exists", "read"):
        real = getattr(LocalStorage, method)
        monkeypatch.setattr(
            LocalStorage, method, lambda storage, name, real=real: (asked.append(name), real(storage, name))[1]
        )
    chain.retain(2)
    assert len(asked) == 2
    assert equal(chain.load(version(19)), weights_of(19))
    assert len(asked) == 3
    monkeypatch.undo()
    assert len(chain.versions()) == 20


@pytest.mark.parametrize("stop_at", range(4))
def test_a_publication_that_stops_anywhere_is_repeated(tmp_path, stop_at):
    publish(VersionChain(LocalStorage(tmp_path)), 2)
    chain = VersionChain(RecordedStorage(tmp_path, stop_at=stop_at))
    chain.load(version(1))
    with pytest.raises(StopError):
        chain.publish(version(2), version(1), FlatWeights.of(weights_of(2)))
    assert VersionChain(LocalStorage(tmp_path)).versions() == [version(0), version(1)]
    again = VersionChain(LocalStorage(tmp_path))
    again.load(version(1))
    again.publish(version(2), version(1), FlatWeights.of(weights_of(3)))
    assert again.manifest(version(2)).kind == "delta"
    assert equal(VersionChain(LocalStorage(tmp_path)).load(version(2)), weights_of(3))


def test_another_tensor_than_in_the_parent_is_refused_by_name(tmp_path):
    chain = VersionChain(LocalStorage(tmp_path))
    publish(chain, 1)
    with pytest.raises(ValueError, match=r"added \(absent before"):
        chain.publish(version(1), version(0), FlatWeights.of(weights_of(1) | {"added": torch.ones(1)}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parent": {"epoch": 1, "number": 3}}, "more than"),
        ({"kind": "sideways"}, "kind 'sideways'"),
        ({"parent": None}, "parent None"),
        ({"version": {"epoch": 1, "number": 7}}, "is that of 0001-00000007"),
        ({"more": 1}, "not the manifest"),
    ],
)
def test_a_manifest_that_leads_nowhere_is_refused(tmp_path, changes, told):
    publish(VersionChain(LocalStorage(tmp_path)), 4)
    file = tmp_path / "policy" / str(version(2)) / "manifest.json"
    file.write_bytes(json.dumps(json.loads(file.read_bytes()) | changes).encode())
    with pytest.raises(CorruptVersionError, match=told):
        VersionChain(LocalStorage(tmp_path)).load(version(3))


def test_bytes_that_are_no_manifest_are_refused(tmp_path):
    publish(VersionChain(LocalStorage(tmp_path)), 1)
    for data in (b"", b"{", b"[]", b"null", b"\xff"):
        (tmp_path / "policy" / str(version(0)) / "manifest.json").write_bytes(data)
        with pytest.raises(CorruptVersionError, match=str(version(0))):
            VersionChain(LocalStorage(tmp_path)).load(version(0))
