"""What is measured and noted of the machine."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tapernorm_lab.experiments import machine
from tapernorm_lab.experiments.speed.interleaved_timing import interleave

CPU = torch.device("cpu")


def test_the_read_bandwidth_is_the_bytes_of_the_buffer_over_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))

    def timed(arms, **options):
        assert len(arms) == 1
        return interleave(arms, **options, clock=lambda: 0.25 * next(ticks) ** 2)

    monkeypatch.setitem(machine._BUFFER_BYTES, "cpu", 4000)
    monkeypatch.setattr(machine, "interleave", timed)
    found = machine.read_bandwidth(CPU, rounds=3)
    # Two calls of the clock to warm up (a beginning each), then the seconds from tick 2 to 3, 4 to 5, 6 to 7.
    assert found == [4000 / (0.25 * (b * b - a * a)) for a, b in ((2, 3), (4, 5), (6, 7))]


def test_the_buffer_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    right = torch.Tensor.sum
    monkeypatch.setitem(machine._BUFFER_BYTES, "cpu", 4000)
    monkeypatch.setattr(torch.Tensor, "sum", lambda self: sums.append(self.nbytes) or right(self))
    machine.read_bandwidth(CPU, rounds=3)
    assert sums == [4000] * 5


def test_a_buffer_is_far_larger_than_a_cache() -> None:
    assert machine._BUFFER_BYTES["cpu"] >= 512 * 2**20
    assert machine._BUFFER_BYTES["cuda"] >= 2**32


def test_facts_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 7.0, 9.0))
    facts = machine.machine_facts(CPU)
    assert facts.pop("device").endswith(" CPU")
    assert facts == {"threads": torch.get_num_threads(), "tf32": None, "clocks": None, "load": 1.25}
    machine.synchronize(CPU)  # nothing to wait for


def test_clocks_are_left_out_where_the_driver_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def refused(_: object) -> int:
        raise NVMLError("not permitted")

    fake = SimpleNamespace(clock_rate=lambda _: 1980, temperature=lambda _: 41)
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine._clocks(CPU) is None  # the driver's management library is missing
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))
    assert machine._clocks(CPU) == {"sm_mhz": 1980, "temperature_c": 41}
    fake.clock_rate = refused
    assert machine._clocks(CPU) is None
