"""Policy versions: published once and whole, verified by digest, deleted behind newer ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from recorded_storage import RecordedStorage, StopError

from gyre_core.config.sections import ModelsConfig
from gyre_core.policy.models import copy_weights, load_policy
from gyre_core.storage import LocalStorage, MemoryStorage, OutOfSpaceError
from gyre_core.types import PolicyVersion
from gyre_core.weights.chain import HELD_STATES, CorruptVersionError, VersionChain, VersionManifest
from gyre_core.weights.digests import file_digest, tensor_digest
from gyre_core.weights.flat import FlatWeights

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)


def weights_of(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (7, 3), "norm": (3,), "scale": (), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def raw(tensor):
    """Type, shape and bits."""
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same_bits(left, right):
    return {name: raw(tensor) for name, tensor in left.items()} == {name: raw(right[name]) for name in right}


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path) if request.param == "local" else MemoryStorage(f"chain/{tmp_path.name}")


def weights_file(root, version):
    return Path(root) / "policy" / str(version) / "weights.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit(storage, dtype):
    weights = weights_of(1, dtype)
    weights["embedding"][0, 0] = torch.nan
    weights["embedding"][0, 1] = -0.0
    weights["embedding"][1, 1] = torch.inf
    chain = VersionChain(storage)
    manifest = chain.publish(SECOND, FIRST, FlatWeights.of(weights))
    assert same_bits(chain.load(SECOND), weights)
    assert same_bits(VersionChain(storage).load(SECOND), weights)
    assert chain.manifest(SECOND) == manifest
    assert (manifest.version, manifest.parent, manifest.kind) == (SECOND, FIRST, "full")
    assert manifest.size == storage.size(f"policy/{SECOND}/weights.safetensors")
    assert chain.versions() == [SECOND]


def test_strides_do_not_matter(storage):
    weights = {"transposed": torch.arange(12.0).reshape(3, 4).T, "sliced": torch.arange(12.0)[::2]}
    chain = VersionChain(storage)
    chain.publish(FIRST, None, FlatWeights.of(weights))
    assert same_bits(chain.load(FIRST), weights)
    assert same_bits(VersionChain(storage).load(FIRST), weights)
    assert tensor_digest(weights["sliced"]) == tensor_digest(weights["sliced"].clone())


def test_digests_are_xxh3_128_of_the_bytes(tmp_path):
    tensor = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    assert tensor_digest(tensor) == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert tensor_digest(tensor.bfloat16()) == xxhash.xxh3_128_hexdigest(bytes.fromhex("803f00c0003f4040"))
    (tmp_path / "file").write_bytes(b"some bytes" * 1000)
    assert file_digest(tmp_path / "file") == xxhash.xxh3_128_hexdigest(b"some bytes" * 1000)


def test_tied_weights_are_published_once(storage):
    policy, other = (load_policy(ModelsConfig(), seed) for seed in (1, 2))
    chain = VersionChain(storage)
    chain.publish(
        FIRST, None, FlatWeights.of({name: weight.detach() for name, weight in policy.model.named_parameters()})
    )
    loaded = chain.load(FIRST)
    assert "lm_head.weight" not in loaded
    copy_weights(other.model, loaded)
    assert same_bits(other.model.state_dict(), policy.model.state_dict())


@pytest.mark.parametrize("stop_at", range(4))
def test_a_publication_that_stops_anywhere_is_not_seen_and_can_be_repeated(tmp_path, stop_at):
    weights = weights_of(1)
    with pytest.raises(StopError):
        VersionChain(RecordedStorage(tmp_path, stop_at=stop_at)).publish(FIRST, None, FlatWeights.of(weights))
    chain = VersionChain(LocalStorage(tmp_path))
    assert chain.versions() == []
    assert not chain.exists(FIRST)
    with pytest.raises(FileNotFoundError):
        chain.load(FIRST)
    chain.publish(FIRST, None, FlatWeights.of(weights_of(2)))
    assert same_bits(chain.load(FIRST), weights_of(2))


def test_the_manifest_comes_last(tmp_path):
    storage = RecordedStorage(tmp_path)
    VersionChain(storage).publish(FIRST, None, FlatWeights.of(weights_of(1)))
    assert [operation for operation, _ in storage.changes] == ["delete", "delete", "create_file", "create"]
    assert storage.changes[-1][1].endswith("manifest.json")


def test_repeating_a_publication_changes_nothing(tmp_path):
    storage = RecordedStorage(tmp_path)
    chain = VersionChain(storage)
    manifest = chain.publish(FIRST, None, FlatWeights.of(weights_of(1)))
    storage.changes.clear()
    assert chain.publish(FIRST, None, FlatWeights.of(weights_of(1))) == manifest
    assert storage.changes == []


def test_a_version_is_never_published_with_other_weights(storage):
    chain = VersionChain(storage)
    chain.publish(FIRST, None, FlatWeights.of(weights_of(1)))
    for other in (weights_of(2), weights_of(1) | {"more": torch.zeros(1)}, {"norm": weights_of(1)["norm"]}):
        with pytest.raises(RuntimeError, match="already published with other weights"):
            chain.publish(FIRST, None, FlatWeights.of(other))
    assert same_bits(chain.load(FIRST), weights_of(1))


def damage_by_cutting(file):
    file.write_bytes(file.read_bytes()[:-1])


def damage_by_emptying(file):
    file.write_bytes(b"")


def damage_by_a_bit_in_a_tensor(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def damage_by_the_header(file):
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [damage_by_cutting, damage_by_emptying, damage_by_a_bit_in_a_tensor, damage_by_the_header]
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    VersionChain(LocalStorage(tmp_path)).publish(FIRST, None, FlatWeights.of(weights_of(1)))
    damage(weights_file(tmp_path, FIRST))
    with pytest.raises(CorruptVersionError, match=str(FIRST)):
        VersionChain(LocalStorage(tmp_path)).load(FIRST)


def test_what_was_just_published_is_at_hand_as_it_was_then(tmp_path, monkeypatch):
    """The publisher's own load takes a copy that no later update reaches; an older or larger version is read."""
    chain, weights = VersionChain(LocalStorage(tmp_path)), weights_of(1)
    chain.publish(FIRST, None, FlatWeights.of(weights))
    weights["embedding"].zero_()
    weights_file(tmp_path, FIRST).write_bytes(b"not looked at")
    assert same_bits(chain.load(FIRST), weights_of(1))
    chain.withdraw(FIRST)
    with pytest.raises(FileNotFoundError):
        chain.load(FIRST)
    chain.publish(SECOND, FIRST, FlatWeights.of(weights_of(2)))
    monkeypatch.setattr("gyre_core.weights.chain.HELD_BYTES", 1)
    chain.publish(PolicyVersion(1, 2), SECOND, FlatWeights.of(weights_of(3)))
    for version in (SECOND, PolicyVersion(1, 2)):
        weights_file(tmp_path, version).write_bytes(b"looked at")
    assert same_bits(chain.load(PolicyVersion(1, 2)), weights_of(3))
    with pytest.raises(CorruptVersionError):
        chain.load(SECOND)


def test_few_versions_are_at_hand(tmp_path):
    chain = VersionChain(LocalStorage(tmp_path))
    for number in range(6):
        chain.publish(PolicyVersion(1, number), None, FlatWeights.of(weights_of(number)))
        weights_file(tmp_path, PolicyVersion(1, number)).write_bytes(b"looked at")
    for number in range(6):
        if number >= 6 - HELD_STATES:
            assert same_bits(chain.load(PolicyVersion(1, number)), weights_of(number))
        else:
            with pytest.raises(CorruptVersionError):
                chain.load(PolicyVersion(1, number))


def test_a_file_of_another_version_is_refused(tmp_path):
    chain = VersionChain(LocalStorage(tmp_path))
    chain.publish(FIRST, None, FlatWeights.of(weights_of(1)))
    chain.publish(SECOND, FIRST, FlatWeights.of(weights_of(2)))
    shutil.copy(weights_file(tmp_path, SECOND), weights_file(tmp_path, FIRST))
    with pytest.raises(CorruptVersionError, match="do not match their digest"):
        VersionChain(LocalStorage(tmp_path)).load(FIRST)
    chain.publish(PolicyVersion(1, 2), None, FlatWeights.of({"norm": torch.zeros(3)}))
    shutil.copy(weights_file(tmp_path, PolicyVersion(1, 2)), weights_file(tmp_path, FIRST))
    with pytest.raises(CorruptVersionError, match="do not match their digest"):
        VersionChain(LocalStorage(tmp_path)).load(FIRST)


def test_a_manifest_of_another_release_is_refused(tmp_path):
    chain = VersionChain(LocalStorage(tmp_path))
    manifest = chain.publish(FIRST, None, FlatWeights.of(weights_of(1)))
    assert VersionManifest.from_json(manifest.to_json()) == manifest
    fields = json.loads(manifest.to_json()) | {"format": 99}
    with pytest.raises(ValueError, match="another release"):
        VersionManifest.from_json(json.dumps(fields).encode())


def test_versions_are_ordered_by_epoch_then_number(storage):
    chain = VersionChain(storage)
    versions = [PolicyVersion(2, 3), PolicyVersion(1, 10), PolicyVersion(1, 9), PolicyVersion(10, 0)]
    for version in versions:
        chain.publish(version, None, FlatWeights.of(weights_of(version.number)))
    assert chain.versions() == [PolicyVersion(1, 9), PolicyVersion(1, 10), PolicyVersion(2, 3), PolicyVersion(10, 0)]


def test_retention_keeps_the_newest_and_never_shows_a_torn_one(tmp_path):
    """After every change, whatever is listed as a version loads."""

    def check(operation, name):
        chain = VersionChain(LocalStorage(tmp_path))
        for version in chain.versions():
            assert same_bits(chain.load(version), weights_of(version.number))

    storage = RecordedStorage(tmp_path, check)
    chain = VersionChain(storage)
    for number in range(6):
        chain.publish(PolicyVersion(1, number), None, FlatWeights.of(weights_of(number)))
        chain.retain(3)
        assert chain.versions() == [PolicyVersion(1, kept) for kept in range(max(0, number - 2), number + 1)]
    deleted = [name for operation, name in storage.changes if operation == "delete_folder"]
    assert deleted == [f"policy/{PolicyVersion(1, number)}" for number in range(3)]
    assert len(storage.folders("policy")) == 3


@pytest.mark.parametrize("stop_at", [0, 1])
def test_a_retention_that_stops_anywhere_is_finished_by_the_next(tmp_path, stop_at):
    chain = VersionChain(LocalStorage(tmp_path))
    for number in range(3):
        chain.publish(PolicyVersion(1, number), None, FlatWeights.of(weights_of(number)))
    with pytest.raises(StopError):
        VersionChain(RecordedStorage(tmp_path, stop_at=stop_at)).retain(2)
    for version in chain.versions():
        chain.load(version)
    chain.retain(1)
    assert chain.versions() == [PolicyVersion(1, 2)]
    assert LocalStorage(tmp_path).folders("policy") == [f"policy/{PolicyVersion(1, 2)}"]


def test_a_full_disk_is_told_and_leaves_the_older_versions(small_volume):
    folder = small_volume(256)
    chain = VersionChain(LocalStorage(folder))
    chain.publish(FIRST, None, FlatWeights.of({"weight": torch.zeros(40_000)}))
    with pytest.raises(OutOfSpaceError, match=r"weights\.safetensors"):
        chain.publish(SECOND, FIRST, FlatWeights.of({"weight": torch.ones(40_000)}))
    assert chain.versions() == [FIRST]
    chain.load(FIRST)
