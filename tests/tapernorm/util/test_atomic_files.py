"""Whole or absent, whatever stops the writer."""

import errno
import hashlib
import os
import resource
import signal
from pathlib import Path

import pytest

from tapernorm.util.atomic_files import (
    read_json,
    remove_partials,
    sha256_of,
    sync_folder,
    whole_file,
    write_json,
    write_text,
)
from tapernorm.util.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_with_the_folders_it_needs(tmp_path):
    path = tmp_path / "a" / "b" / "text"
    with whole_file(path) as temporary:
        assert temporary.parent == path.parent  # the rename stays within one file system
        temporary.write_text("content")
        assert not path.exists()
    assert path.read_text() == "content"
    assert names(path.parent) == ["text"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3), UserError("x")])
def test_an_error_leaves_what_was_there(tmp_path, error):
    write_text(tmp_path / "text", "earlier")

    def write() -> None:
        with whole_file(tmp_path / "text") as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert raised.value is error
    assert error.__cause__ is None
    assert names(tmp_path) == ["text"]
    assert (tmp_path / "text").read_text() == "earlier"


def test_content_is_durable_before_it_is_renamed_and_the_rename_after(tmp_path, monkeypatch):
    """The order that survives a power cut: fsync(file), rename, fsync(folder)."""
    done: list[tuple[str, str]] = []
    replace, fsync = os.replace, os.fsync

    def recorded_replace(source: Path, target: Path) -> None:
        done.append(("rename", target.name))
        replace(source, target)

    def recorded_fsync(descriptor: int) -> None:
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", recorded_replace)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    write_text(tmp_path / "text", "content")
    partial = f".text.{os.getpid()}.partial"
    assert done == [("fsync", partial), ("rename", "text"), ("fsync", tmp_path.name)]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    """/dev/full stands for the temporary file: every write fails with the kernel's own ENOSPC."""
    path = tmp_path / "text"
    write_text(path, "earlier")
    (tmp_path / f".text.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*/text: the disk is full") as raised:
        write_text(path, "later")
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == ["text"]
    assert path.read_text() == "earlier"


def test_a_write_that_falls_short_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="ulimit -f"):
            write_text(tmp_path / "text", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied"),
    ],
)
def test_other_refusals_of_the_system_are_explained(tmp_path, code, said):
    with pytest.raises(UserError, match=f"cannot write .*/text: {said}"), whole_file(tmp_path / "text"):
        raise OSError(code, os.strerror(code))


def test_an_unknown_refusal_stays_what_it_was(tmp_path):
    with pytest.raises(OSError, match="Input/output") as raised, whole_file(tmp_path / "text"):
        raise OSError(errno.EIO, "Input/output error")
    assert not isinstance(raised.value, UserError)


def test_a_file_in_place_of_the_folder_is_explained(tmp_path):
    write_text(tmp_path / "file", "x")
    for path in (tmp_path / "file" / "inner", tmp_path / "file" / "deep" / "inner"):
        with pytest.raises(UserError, match="a file is where a folder is needed"):
            write_text(path, "y")
    assert (tmp_path / "file").read_text() == "x"


def test_a_killed_writer_leaves_the_earlier_content_and_a_partial_that_can_be_removed(tmp_path):
    write_text(tmp_path / "text", "earlier")
    child = os.fork()
    if child == 0:
        with whole_file(tmp_path / "text") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "text").read_text() == "earlier"
    assert f".text.{child}.partial" in names(tmp_path)
    (tmp_path / "partial").write_text("no temporary file")
    remove_partials(tmp_path)
    assert names(tmp_path) == ["partial", "text"]
    remove_partials(tmp_path / "absent")


def test_json_is_read_back_and_never_holds_nan(tmp_path):
    value = {"z": [1, 2.5, None, "å ▁\u2028"], "a": {"b": True}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert list(read_json(tmp_path / "x.json")) == ["z", "a"]
    assert "å" in (tmp_path / "x.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert read_json(tmp_path / "x.json") == value
    assert names(tmp_path) == ["x.json"]


def test_the_checksum_is_sha256(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "x").write_bytes(content)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(content).hexdigest()
    sync_folder(tmp_path)
