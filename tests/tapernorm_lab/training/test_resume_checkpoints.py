"""Checkpoints come back bit for bit, two are kept, damage is seen, strangers are refused."""

import errno
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from tapernorm.util.errors import UserError
from tapernorm_lab.training.resume_checkpoints import Checkpoints, HashedWriter

OWN, FOREIGN = "a" * 16, "b" * 16


def state(step: int) -> dict[str, Any]:
    values = torch.arange(500, dtype=torch.float64) / (step + 3)
    return {
        "model": {"w": values.float(), "c": torch.tensor(torch.nan)},
        "wide": values,
        "time": 0.1 * step,
        "no": None,
    }


def newest(checkpoints: Checkpoints) -> tuple[int, dict[str, Any]] | None:
    found = checkpoints.latest()
    return None if found is None else checkpoints.load(found)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(-7), other.nan_to_num(-7))
    return one == other


def test_the_newest_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "resume", OWN)
    assert checkpoints.latest() is None
    for step in (5, 10):
        checkpoints.save(step, state(step))
    found = newest(Checkpoints(tmp_path / "resume", OWN))
    assert found is not None
    step, loaded = found
    assert step == 10
    assert same(loaded, state(10))
    assert not same(loaded, state(5))


def test_two_are_kept_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, OWN)
    for step in (2, 9, 10, 99, 100):
        checkpoints.save(step, state(step))
    assert [name.split(".")[0] for name in names(tmp_path)] == ["step-00000099", "step-00000100"]
    found = newest(checkpoints)
    assert found is not None
    assert found[0] == 100


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path, FOREIGN).save(3, state(3))
    with pytest.raises(UserError, match=f"{FOREIGN}, this run {OWN}.*start anew"):
        newest(Checkpoints(tmp_path, OWN))
    assert len(names(tmp_path)) == 1


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)


def rename(path: Path) -> None:
    path.rename(path.with_name("step-00000010.pt"))


@pytest.mark.parametrize("damage", [cut, empty, flip, rename])
def test_damage_falls_back_and_is_cleared_away(tmp_path: Path, capsys, damage) -> None:
    checkpoints = Checkpoints(tmp_path, OWN)
    for step in (5, 10):
        checkpoints.save(step, state(step))
    older, newer = sorted(tmp_path.iterdir())
    damage(newer)
    found = newest(checkpoints)
    assert found is not None
    assert (found[0], same(found[1], state(5))) == (5, True)
    said = capsys.readouterr().err
    assert "step-00000010" in said
    assert f"is damaged and removed; falling back to {older.name}" in said
    assert names(tmp_path) == [older.name]
    assert checkpoints.latest() is not None
    assert capsys.readouterr().err == ""

    checkpoints.save(10, state(10))  # the damaged one does not take the place of the good ones
    assert [name[:13] for name in names(tmp_path)] == ["step-00000005", "step-00000010"]
    damage(older)
    assert checkpoints.latest() is not None


def test_two_damaged_ones_start_anew(tmp_path: Path, capsys) -> None:
    checkpoints = Checkpoints(tmp_path, OWN)
    for step in (5, 10):
        checkpoints.save(step, state(step))
    for path in tmp_path.iterdir():
        flip(path)
    assert checkpoints.latest() is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[1].endswith("starting anew")


@pytest.mark.parametrize("room", [0, 700, 3000, 7000])
def test_a_full_disk_keeps_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Wherever in the file it strikes: in the first bytes, within a tensor, in the table at the end."""
    checkpoints = Checkpoints(tmp_path, OWN)
    checkpoints.save(5, state(5))
    checkpoints.save(10, state(10))
    before = names(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert room < min(sizes)
    original, written = HashedWriter._write, 0

    def full(self: HashedWriter, content: memoryview) -> None:
        nonlocal written
        written += len(content)
        if written > room:
            original(self, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, content)

    monkeypatch.setattr(HashedWriter, "_write", full)
    with pytest.raises(UserError, match=r"cannot write .*step-00000015.*: the disk is full") as raised:
        checkpoints.save(15, state(15))
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == before
    found = newest(checkpoints)
    assert found is not None
    assert found[0] == 10


def test_a_checkpoint_is_not_held_in_memory(tmp_path: Path) -> None:
    """Neither to be written, where no copy is made, nor to be read, where the tensors are the file's own pages."""
    size = 2**24
    checkpoints = Checkpoints(tmp_path, OWN)
    tracemalloc.start()
    try:
        checkpoints.save(2, {str(i): torch.full((size // 16,), float(i)) for i in range(4)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    path = checkpoints.latest()
    assert path is not None
    assert path.stat().st_size > size
    assert peak < size // 10
    assert str(path) not in Path("/proc/self/maps").read_text()
    _, loaded = checkpoints.load(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert all(tensor[-1] == float(name) for name, tensor in loaded.items())


def test_what_was_read_survives_its_file_and_is_saved_again_without_the_rest(tmp_path: Path) -> None:
    """An optimizer on the CPU goes on with the tensors that were read, writes to them, and saves them again."""
    checkpoints = Checkpoints(tmp_path, OWN)
    checkpoints.save(1, state(1))
    path = checkpoints.latest()
    assert path is not None
    content = path.read_bytes()
    _, loaded = checkpoints.load(path)
    loaded["wide"].add_(1)
    assert path.read_bytes() == content
    path.unlink()
    checkpoints.save(2, {"wide": loaded["wide"]})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < len(content)
    found = newest(checkpoints)
    assert found is not None
    assert torch.equal(found[1]["wide"], state(1)["wide"] + 1)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """A file with the right checksum in its name is still loaded as plain tensors and numbers."""

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    checkpoints = Checkpoints(tmp_path / "resume", OWN)
    checkpoints.save(1, {"trap": Trap()})
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        newest(checkpoints)
    assert not (tmp_path / "sprung").exists()
