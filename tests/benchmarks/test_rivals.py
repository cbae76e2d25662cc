"""The comparison of decoders: rounds over processes, arms refused or skipped by name, on engines that only count."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.rivals import __main__ as bench
from benchmarks.rivals.arms import ARMS, ENGINES, REFERENCE, RIVAL, Arm
from benchmarks.rivals.comparison import Workload, compare
from benchmarks.rivals.table import cells, lines
from benchmarks.rivals.workers import Unavailable, Worker
from tapernorm.checkpoints import store
from tapernorm.models.decoder import Decoder
from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.rng import generator

FAKE = Path(__file__).parent / "fake_engine.py"
WORK = Workload(prompt=[5, 7], new_tokens=5, windows=[[1, 2], [3, 4]], rounds=3, warmup=1)


@pytest.fixture
def started(tmp_path):
    """Starts workers of the fake engine, and keeps them to be looked at."""
    workers = []

    def start(arm):
        job = {"name": arm.name, "journal": str(tmp_path / "journal"), **arm.options}
        workers.append(Worker([sys.executable, str(FAKE), json.dumps(job)], log=tmp_path / f"{arm.name}.log"))
        return workers[-1]

    start.workers = workers
    return start


def arm(engine, weights="float32", **options):
    return Arm(engine, weights, options=options)


def compared(start, *arms, reference="a float32", rival="b float32", work=WORK):
    rows = compare(arms, start, work, reference=reference, rival=rival, settle_s=0)
    return {row["arm"]: row for row in rows}


def test_rounds_go_over_all_processes_in_turn_and_no_two_work_at_once(started, tmp_path):
    compared(started, arm("a"), arm("b"), arm("c", "int8"))
    journal = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    names = [name.split()[0] for name, *_ in journal]
    assert names[:4] == ["a", "a", "b", "c"]  # the reference's tokens, then each arm's
    assert names[4:] == [*"cab", *"abc", *"bca", *"cab"]  # a warm-up round, then three
    assert all(end <= begin for (_, _, end), (_, begin, _) in pairwise(journal))
    pids = {worker._process.pid for worker in started.workers}
    assert len(pids) == 3
    assert all(worker._process.returncode is not None for worker in started.workers)  # ended with the comparison


def test_no_round_starts_after_the_given_time_and_a_round_that_started_ends(started):
    rows = compared(started, arm("a"), arm("b"), work=replace(WORK, rounds=10**6, seconds=0.2))
    counts = {len(row["seconds"]) for row in rows.values()}
    assert len(counts) == 1
    assert 1 <= counts.pop() < 10**5
    assert all(row["tokens_per_s"]["n"] == len(row["seconds"]) for row in rows.values())


def test_speeds_and_ratios_come_from_the_seconds_that_the_engines_tell(started):
    rows = compared(started, arm("a", seconds=2.0), arm("b", seconds=0.5), arm("c", "int8", seconds=0.25))
    assert [rows[name]["seconds"] for name in rows] == [[2.0] * 3, [0.5] * 3, [0.25] * 3]
    assert [rows[name]["tokens_per_s"]["value"] for name in rows] == [2.0, 8.0, 16.0]  # four steps after the first
    assert [rows[name]["over_rival"]["value"] for name in rows] == [0.25, 1.0, 2.0]
    assert all(row["tokens_per_s"]["n"] == WORK.rounds for row in rows.values())


def test_a_float32_arm_with_other_tokens_is_refused_and_not_timed(started):
    rows = compared(started, arm("a"), arm("b"), arm("wrong", step=2), arm("coarse", "int8", step=2))
    refused, coarse = rows["wrong float32"], rows["coarse int8"]
    assert refused["state"] == "refused"
    assert "1th" in refused["reason"]
    assert refused["seconds"] == []
    assert refused["tokens_per_s"] is refused["over_rival"] is None
    assert coarse["state"] == "measured"  # the same tokens under another name of the weights
    assert coarse["equal_tokens"] == 0
    assert coarse["loss"] == 4.0
    assert rows["b float32"]["loss"] is None
    assert rows["a float32"]["loss"] == 4.0


def test_engines_that_are_missing_or_fail_are_skipped_by_name_and_the_rest_is_measured(started, tmp_path):
    arms = [arm("a"), arm("b", missing="no module named b"), arm("c", fails="no such kernel"), arm("d", unknown=1)]
    rows = compared(started, *arms)
    assert [row["state"] for row in rows.values()] == ["measured", "skipped", "skipped", "skipped"]
    assert rows["b float32"]["reason"] == "no module named b"
    assert rows["c float32"]["reason"] == "ValueError: no such kernel"
    assert rows["d float32"]["reason"].startswith("TypeError")
    assert rows["a float32"]["over_rival"] is None  # nothing to pair with
    with pytest.raises(Unavailable, match="does not start"):
        Worker(["no-such-python"], log=tmp_path / "log")
    with pytest.raises(Unavailable, match="ended"):
        Worker([sys.executable, "-c", ""], log=tmp_path / "log")
    with pytest.raises(Unavailable, match="no module named b"):  # nothing to compare tokens with
        compared(started, *arms, reference="b float32")


def test_a_process_that_dies_in_a_request_is_told(started):
    worker = started(arm("a"))
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(Unavailable, match="ended"):
        worker("decode", [1], 2)
    worker.close()


def test_what_is_printed_beside_an_answer_goes_to_the_log(started, tmp_path):
    with started(arm("a")) as worker:
        assert worker("decode", [1], 2) == [[2, 3], 1.0]
    assert "no answer" in (tmp_path / "a float32.log").read_text()


def test_the_table_shows_numbers_or_the_reason(started):
    rows = compared(started, arm("a"), arm("b", seconds=0.5), arm("wrong", step=2), arm("c", "int8", seconds=0.25))
    measured, refused = cells(rows["c int8"]), cells(rows["wrong float32"])
    assert measured == ["c", "int8", "16", "16–16", "2", "2–2", "100 %", "4.0000"]
    assert refused[:2] == ["wrong", "float32"]
    assert refused[2].startswith("refused: ")
    shown = lines({"rows": list(rows.values())})
    assert len(shown.splitlines()) == 5


def test_the_arms_have_names_of_their_own_and_engines_that_exist():
    names = [arm.name for arm in ARMS]
    assert len(set(names)) == len(names)
    assert {REFERENCE, RIVAL} <= set(names)
    for arm in ARMS:
        module, _ = ENGINES[arm.engine].split(":")
        assert (Path(bench.__file__).parent / f"{module}.py").is_file()


def test_a_comparison_is_done_when_job_and_committed_code_are_the_same(monkeypatch):
    found = {"job": {"d_model": 64}, "provenance": {"commit": "d" * 40}}
    monkeypatch.setattr(bench, "code_commit", lambda: "d" * 40)
    assert bench.is_done(found, {"d_model": 64})
    assert not bench.is_done(found, {"d_model": 512})
    monkeypatch.setattr(bench, "code_commit", lambda: "e" * 40)
    assert not bench.is_done(found, {"d_model": 64})
    found["provenance"]["commit"] = "e" * 40 + "+dirty"
    monkeypatch.setattr(bench, "code_commit", lambda: "e" * 40 + "+dirty")
    assert not bench.is_done(found, {"d_model": 64})


# From here on the engines are real. `make bench-rivals` makes the environment; without it they are skipped by name.
RIVALS = Path("build/rivals/venv/bin/python")
PROMPT, WINDOWS = [3, 17, 99, 41, 5], [[7, 8, 200, 41, 5, 6, 88], [90, 1, 3, 250, 17, 11, 4]]
TOLERANCES = {"float32": 2e-5, "Q8_0": 0.02, "int8": 0.02}  # of the loss, nats


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two models with fewer key-value heads and a head of their own, whose logits are far apart."""
    folders = []
    for seed in (0, 1):
        shape = DecoderConfig(
            vocab_size=300, d_model=64, n_layer=2, n_head=8, n_kv_head=2, d_ff=96, context=64,
            norm="rmsnorm", norm_eps=1e-5, rope_theta=500.0, tie_head=False,
        )  # fmt: skip
        model = Decoder(shape).initialize(generator(seed, "init"))
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator(seed, "noise"))
                parameter.mul_(1 + 0.3 * noise) if parameter.ndim == 1 else parameter.mul_(8)
        folders.append(tmp_path_factory.mktemp("model") / "d64")
        store.save(model, folders[-1])
    return folders


def asked(arm, folder, log):
    """(tokens, loss) of a real engine; a skip where it is missing."""
    try:
        with bench.worker(arm, folder, 1, str(RIVALS), log) as worker:
            return worker("decode", PROMPT, 24)[0], worker("loss", WINDOWS)
    except Unavailable as missing:
        pytest.skip(f"{arm.name}: {missing}")


@pytest.mark.slow
@pytest.mark.parametrize("arm", [arm for arm in ARMS if "compile" not in arm.options], ids=lambda arm: arm.name)
def test_an_engine_has_the_tokens_and_the_loss_of_transformers(arm, checkpoints, tmp_path):
    (reference,) = [one for one in ARMS if one.name == REFERENCE]
    right, loss = asked(reference, checkpoints[0], tmp_path)
    tokens, found = asked(arm, checkpoints[0], tmp_path)
    assert len(set(right)) > 3
    assert found == pytest.approx(loss, abs=TOLERANCES[arm.weights])
    if arm.is_exact:
        assert tokens == right
    other, far = asked(arm, checkpoints[1], tmp_path)  # which the tolerances must tell apart
    assert other != right
    assert abs(far - loss) > 0.1
