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


def newest(checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
    found = checkpoints.latest()
    assert found is not None
    return checkpoints.load(found)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(-7), other.nan_to_num(-7))
    return one == other


def test_the_newest_of_two_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "resume", OWN)
    assert checkpoints.latest() is None
    for step in (2, 9, 10, 99, 100):
        checkpoints.save(step, state(step))
    assert [name.split(".")[0] for name in names(tmp_path / "resume")] == ["step-00000099", "step-00000100"]
    step, loaded = newest(Checkpoints(tmp_path / "resume", OWN))
    assert step == 100
    assert same(loaded, state(100))
    assert not same(loaded, state(99))


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path, FOREIGN).save(3, state(3))
    with pytest.raises(UserError, match=f"{FOREIGN}, this run {OWN}.*start anew"):
        newest(Checkpoints(tmp_path, OWN))
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("room", [0, 3000, 7000])
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
    assert newest(checkpoints)[0] == 10


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
    assert torch.equal(newest(checkpoints)[1]["wide"], state(1)["wide"] + 1)


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
