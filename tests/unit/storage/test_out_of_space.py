"""A full volume is told in a sentence, whoever noticed it."""

import errno
import os

import pytest
from full_disk import leave_free

from gyre_core.policy.tiny import tiny_tokenizer
from gyre_core.storage import OutOfSpaceError, telling_out_of_space


def raise_error(number, target, **details):
    with telling_out_of_space(target, **details):
        raise OSError(number, os.strerror(number), "some/file")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_place_and_bytes_are_told(tmp_path, number):
    (tmp_path / "part").write_bytes(b"12345")
    (tmp_path / "nothing").touch()
    for details, size in (
        ({}, ""),
        ({"size": 77}, " of 77 bytes"),
        ({"unfinished": tmp_path / "part"}, " of 5 bytes or more"),
        ({"unfinished": tmp_path / "nothing"}, ""),
        ({"unfinished": tmp_path / "gone"}, ""),
    ):
        with pytest.raises(OutOfSpaceError) as raised:
            raise_error(number, tmp_path / "a", **details)
        assert str(raised.value) == f"no space left in {tmp_path} for a{size}; free some or choose another storage"
        assert raised.value.errno == number


def test_other_errors_pass(tmp_path):
    with pytest.raises(PermissionError):
        raise_error(errno.EACCES, tmp_path / "a")
    with pytest.raises(ValueError, match="as it is"), telling_out_of_space(tmp_path / "a"):
        raise ValueError("as it is")
    with pytest.raises(OutOfSpaceError, match=r"for inner;"), telling_out_of_space(tmp_path / "outer"):
        raise_error(errno.ENOSPC, tmp_path / "inner")


def test_libraries_that_tell_of_it_in_words_alone_are_understood(small_volume):
    folder = small_volume(64)
    leave_free(folder, 0)
    told = pytest.raises(OutOfSpaceError, match=f"no space left in {folder} for tokenizer")
    with told, telling_out_of_space(folder / "tokenizer"):
        tiny_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
