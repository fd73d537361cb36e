"""A trial of a place names the promise that the place breaks."""

import pytest

from gyre_core.storage import LocalStorage, MemoryStorage, exercise_storage


class ForgetfulStorage(LocalStorage):
    """Lets a second writer take a name, as a storage without exclusive creation does."""

    def create(self, name, data):
        self.replace(name, data)


class ForgetfulOfFiles(LocalStorage):
    """Lets a second writer take the name of a large object."""

    def create_file(self, name, write):
        self.delete(name)
        return super().create_file(name, write)


class CachedStorage(LocalStorage):
    """Lists what was there at its first look."""

    listed = None

    def list(self, folder=""):
        self.listed = self.listed or super().list(folder)
        return self.listed


class LateStorage(LocalStorage):
    """Lists objects some time after they were written."""

    def list(self, folder=""):
        return []


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (ForgetfulStorage, "lets a second writer take a name that is taken"),
        (ForgetfulOfFiles, "lets a second writer take a name that is taken"),
        (CachedStorage, "shows what was just deleted"),
        (LateStorage, "does not show what was just written"),
    ],
)
def test_a_broken_promise_is_named_with_the_place(tmp_path, kind, broken):
    with pytest.raises(RuntimeError, match=f"{tmp_path} {broken}; choose another storage.url"):
        exercise_storage(kind(tmp_path))


def test_a_place_that_keeps_them_is_left_as_it_was():
    storage = MemoryStorage("trial")
    assert exercise_storage(storage) > 0
    assert storage.list() == []
