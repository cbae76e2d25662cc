"""A whole job: the same numbers however often it is killed, and nothing half-published."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import at_operation, at_step, in_evaluation, kill, nothing, run_apart
from training import (
    HARDWARE,
    START,
    STEPS,
    checkpointing,
    command,
    leftovers,
    make_job,
    metrics_of,
    outcome_of,
    write_stream,
)

import tapernorm.util.provenance
import tapernorm_lab.training.plan
import tapernorm_lab.training.run_folder
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.jobs import PretrainJob
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.training.resume_checkpoints import Checkpoints
from tapernorm_lab.training.run_folder import RESULT_FILES
from tapernorm_lab.training.run_lock import run_lock
from tapernorm_lab.training.trainer import Diverged, Trainer

SPARSE = make_job(log_every=4, eval_every=6)  # few file operations
EVALUATION_BATCHES = 4  # 100 targets: 12 windows in batches of 4, and a rest


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def uninterrupted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[PretrainJob], dict[str, Any]]:
    """What a job ends with when nothing happens to it."""
    known: dict[str, dict[str, Any]] = {}

    def outcome(job: PretrainJob) -> dict[str, Any]:
        key = job.model_dump_json()
        if key not in known:
            run = tmp_path_factory.mktemp("uninterrupted")
            pretrain(job, tokens, run, HARDWARE)
            known[key] = outcome_of(run)
        return known[key]

    return outcome


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The optimizer steps taken from here on, in this process."""
    steps: list[int] = []
    original = Trainer.step

    def recorded(self: Trainer, k: int) -> dict[str, Any]:
        steps.append(k)
        return original(self, k)

    monkeypatch.setattr(Trainer, "step", recorded)
    return steps


# --- the same run twice ---


@pytest.mark.parametrize(
    ("variant", "norm"), [("baseline", "layernorm"), ("internal", "rmsnorm"), ("all_aux", "layernorm")]
)
def test_the_same_seed_gives_the_same_bits(tokens: Path, tmp_path: Path, variant: str, norm: str) -> None:
    for run in ("one", "two"):
        pretrain(make_job(variant, norm=norm), tokens, tmp_path / run, HARDWARE)
    pretrain(make_job(variant, norm=norm, seed=4), tokens, tmp_path / "other", HARDWARE)
    one, two, other = (outcome_of(tmp_path / run) for run in ("one", "two", "other"))
    assert one == two
    assert one["weights"] != other["weights"]
    assert one["metrics"] != other["metrics"]


@pytest.mark.parametrize("cadence", [{"log_every": 5}, {"eval_every": 2}, {}])
def test_other_cadences_train_the_same(tokens: Path, tmp_path: Path, uninterrupted, cadence: dict[str, int]) -> None:
    pretrain(make_job(**cadence), tokens, tmp_path, checkpointing(3))
    usual, other = uninterrupted(make_job()), outcome_of(tmp_path)
    assert other["weights"] == usual["weights"]
    assert other["values"] == usual["values"]
    steps = {row["step"]: row for row in usual["metrics"]}
    logged = [row for row in other["metrics"] if "ce" in row]
    assert [row["step"] for row in logged] == ([0, 5, 10, 11] if "log_every" in cadence else list(range(STEPS)))
    assert all(row == steps[row["step"]] for row in logged)
    scored = [row["step"] for row in other["metrics"] if "valid_ce" in row]
    assert scored == ([1, 3, 5, 7, 9, 11] if "eval_every" in cadence else [])


def test_a_run_leaves_its_results_and_its_lock_alone(tokens: Path, tmp_path: Path) -> None:
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("rate", "count"), [(0.1, 1), (1.0, 0)])
def test_a_long_horizon_is_told_once_in_the_log(tokens: Path, tmp_path: Path, capsys, rate: float, count: int) -> None:
    job = make_job(ema_rate=rate, start_fraction=0.9)  # 1/m of 10 steps or one, k_start of 11
    pretrain(job, tokens, tmp_path / "run", HARDWARE)
    assert capsys.readouterr().err.count("taper.ema_rate") == count


def test_the_result_is_the_contract(tokens: Path, tmp_path: Path) -> None:
    job = make_job()
    returned = pretrain(job, tokens, tmp_path, HARDWARE)
    result = read_json(tmp_path / "result.json")
    assert result == returned
    assert (result["schema_version"], result["kind"]) == (1, "pretrain")
    assert PretrainJob.model_validate(result["job"]) == job
    assert {name: entry["unit"] for name, entry in result["values"].items()} == {
        "valid_ce": "nats/token",
        "bits_per_byte": "bits/byte",
        "valid_tokens": "tokens",
        "parameters": "parameters",
        "train_tokens": "tokens",
        "train_time_s": "s",
        "tokens_per_s": "tokens/s",
        "peak_mem_bytes": "bytes",
    }
    values = {name: entry["value"] for name, entry in result["values"].items()}
    assert values["valid_tokens"] == 100
    assert values["train_tokens"] == STEPS * 4 * 8
    assert values["tokens_per_s"] == pytest.approx(values["train_tokens"] / values["train_time_s"])
    assert values["bits_per_byte"] == pytest.approx(values["valid_ce"] * 100 / (4 * 101) / 0.6931471805599453)
    assert len(result["norms"]) == 5
    assert all(entry["c"] > 0 for entry in result["norms"].values())
    rows = metrics_of(tmp_path)
    assert rows[-1]["scale_target"] == result["scale_target"] > 0
    assert {"config_hash", "commit", "device", "seed", "packages", "written_at"} <= result["provenance"].keys()


def test_the_final_score_is_that_of_the_published_model_at_gate_zero(tokens: Path, tmp_path: Path, capsys) -> None:
    result = pretrain(make_job(), tokens, tmp_path, HARDWARE)
    assert main(["evaluate", "--model", str(tmp_path), "--tokens", str(tokens), "--batch", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["ce_nats_per_token"] == result["values"]["valid_ce"]["value"]


# --- kill -9 ---


def resumed(job: PretrainJob, tokens: Path, run: Path) -> dict[str, Any]:
    assert main(command(job, tokens, run)) == 0
    assert leftovers(run) == []
    return outcome_of(run)


@pytest.mark.parametrize(
    ("step", "moment", "checkpoint_every"),
    [(START - 1, "after", 1), (START, "within", 5), (START + 4, "before", 5), (STEPS - 1, "within", 1)],
)
def test_a_run_killed_in_a_step_ends_as_if_nothing_had_happened(
    tokens: Path, tmp_path: Path, uninterrupted, trained: list[int], step: int, moment: str, checkpoint_every: int
) -> None:
    job, hardware = make_job(), checkpointing(checkpoint_every)
    expected = uninterrupted(job)
    said = kill(partial(at_step, step, moment), command(job, tokens, tmp_path / "run", hardware), tmp_path / "log")
    assert said == f"killed {moment} step {step}"
    trained.clear()
    assert resumed(job, tokens, tmp_path / "run") == expected
    assert trained == list(range(step - step % checkpoint_every, STEPS))  # and not from the start


@pytest.mark.parametrize("batch", [0, EVALUATION_BATCHES + 1, 2 * EVALUATION_BATCHES + 1])
def test_a_run_killed_while_validating_ends_the_same(
    tokens: Path, tmp_path: Path, uninterrupted, trained: list[int], batch: int
) -> None:
    expected = uninterrupted(SPARSE)
    kill(partial(in_evaluation, batch), command(SPARSE, tokens, tmp_path / "run"), tmp_path / "log")
    trained.clear()
    assert resumed(SPARSE, tokens, tmp_path / "run") == expected
    final = batch >= 2 * EVALUATION_BATCHES
    assert (trained == []) is final  # the last step's checkpoint holds: nothing is left but to score and publish


@pytest.mark.slow
def test_a_run_killed_at_any_file_operation_ends_the_same(tokens: Path, tmp_path: Path, uninterrupted) -> None:
    """Within the metrics' and the checkpoints' own writes, between their steps, and all through publishing."""
    struck = []
    for number in range(200):
        run = tmp_path / str(number)
        if run_apart(partial(at_operation, number), command(SPARSE, tokens, run), tmp_path / "log") == 0:
            break
        struck.append((tmp_path / "log").read_text().splitlines()[-1])
        assert resumed(SPARSE, tokens, run) == uninterrupted(SPARSE), struck[-1]
    assert len(struck) > 50
    for what in (
        *("before fsync", "before replace", "before unlink", "before rmdir", "before _write_all"),
        *("half way through _write_all", "half way through write_bytes", "half way through write_text"),
        *("half way through copyfile", "half way through a checkpoint"),
    ):
        assert any(what in said for said in struck), what
    for file in ("step-00000004", "step-00000012", "metrics.jsonl", "model.safetensors", "config.json", "result.json"):
        assert any("half way" in said and file in said for said in struck), file


def test_a_run_killed_again_and_again_ends_the_same(tokens: Path, tmp_path: Path, uninterrupted) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    kills = 0
    while run_apart(partial(at_operation, 6 + 3 * kills), command(SPARSE, tokens, run), log) != 0:
        kills += 1
        assert len(list(run.rglob("*.partial"))) <= 1  # the leftovers of earlier kills are gone
    assert kills >= 5
    assert outcome_of(run) == uninterrupted(SPARSE)
    assert leftovers(run) == []


def test_a_result_never_stands_beside_files_of_another_run(tokens: Path, tmp_path: Path) -> None:
    """A changed job that overwrites an earlier one, killed anywhere: all files are of one job, or some are absent."""
    log, earlier, other = tmp_path / "log", tmp_path / "earlier", make_job(lr=5e-3, log_every=12)
    pretrain(SPARSE, tokens, earlier, HARDWARE)
    pretrain(other, tokens, tmp_path / "later", HARDWARE)
    before, after = outcome_of(earlier), outcome_of(tmp_path / "later")
    seen = []
    for number in range(200):
        run = Path(shutil.copytree(earlier, tmp_path / str(number)))
        words = [*command(other, tokens, run, checkpointing(12)), "--overwrite"]
        if run_apart(partial(at_operation, number), words, log) == 0:
            break
        whole = all((run / name).exists() for name in RESULT_FILES)
        seen.append(outcome_of(run) if whole else None)
        assert seen[-1] in (before, None, after), log.read_text()
    assert seen[0] == before
    assert None in seen
    assert seen[-1] == after


def test_a_real_process_killed_from_outside_resumes_in_another(tokens: Path, tmp_path: Path, uninterrupted) -> None:
    job, run = make_job(steps=400, log_every=100), tmp_path / "run"
    arguments = [sys.executable, "-m", "tapernorm_lab.cli.main", *command(job, tokens, run, checkpointing(10))]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    try:
        while not list(run.glob("resume/*/step-*.pt")):
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(UserError, match=f"in use by process {process.pid} on "), run_lock(run):
            raise AssertionError("two trainers in one folder")
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (run / "result.json").exists()
    assert run_apart(nothing, command(job, tokens, run), tmp_path / "log") == 0
    assert "resuming after step" in (tmp_path / "log").read_text()
    assert outcome_of(run) == uninterrupted(job)


# --- what may not be resumed ---


CHANGES: list[dict[str, Any]] = [
    *({"seed": 4}, {"steps": 13}, {"d_ff": 24}, {"norm": "layernorm"}, {"tie_head": False}, {"rope_theta": 500.0}),
    *({"batch": 5}, {"lr": 2e-2}, {"warmup_fraction": 0.2}, {"betas": [0.9, 0.99]}, {"weight_decay": 0.0}),
    *({"clip_norm": 0.5}, {"precision": "bf16"}, {"start_fraction": 0.2}, {"end_fraction": 0.9}, {"ema_rate": 0.2}),
    *({"anchor_weight": 0.2}, {"ema_rate": None}),
]


@pytest.fixture(scope="module")
def interrupted_run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed with checkpoints after steps 4 and 8."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    kill(partial(at_step, 10, "before"), command(make_job(), tokens, run), run.with_suffix(".log"))
    (folder,) = (run / "resume").iterdir()
    assert [path.name[:13] for path in sorted(folder.glob("step-*.pt"))] == ["step-00000004", "step-00000008"]
    return run


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_changed_setting_never_resumes_and_loses_nothing(
    tokens: Path, interrupted_run: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    ((name, value),) = change.items()
    with pytest.raises(UserError, match=rf"{name} .* there, {re.escape(json.dumps(value))} here.*--overwrite"):
        first_step(make_job(**change), tokens, interrupted_run, monkeypatch)
    assert first_step(make_job(), tokens, interrupted_run, monkeypatch) == 8  # the control: unchanged, it does


def test_other_data_never_resumes(tokens: Path, interrupted_run: Path, tmp_path: Path, monkeypatch) -> None:
    same, other = write_stream(tmp_path / "same"), write_stream(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"data\.train .* there, .* here"):
        first_step(make_job(), other, interrupted_run, monkeypatch)
    assert first_step(make_job(), same, interrupted_run, monkeypatch) == 8


def test_a_job_that_may_overwrite_starts_anew_and_keeps_what_is_not_tapernorms(
    tokens: Path, interrupted_run: Path, tmp_path: Path, monkeypatch
) -> None:
    run = Path(shutil.copytree(interrupted_run, tmp_path / "run"))
    (run / "notes.txt").write_text("mine")
    assert first_step(make_job(seed=4), tokens, run, monkeypatch, overwrite=True) == 0
    assert (run / "notes.txt").read_text() == "mine"
    assert not list(run.glob("resume/*/step-*.pt"))


def first_step(
    job: PretrainJob, tokens: Path, run: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool = False
) -> int:
    """The step that a run begins with; it gets no further."""

    class Reached(BaseException):
        pass

    def reached(self: Trainer, k: int) -> None:
        raise Reached(k)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", reached)
        with pytest.raises(Reached) as step:
            pretrain(job, tokens, run, HARDWARE, overwrite=overwrite)
    return step.value.args[0]


def newest(folder: Path, fingerprint: str) -> int:
    """The step that a run in `folder` would resume after."""
    checkpoints = Checkpoints(folder, fingerprint)
    path = checkpoints.latest()
    assert path is not None
    return checkpoints.load(path)[0]


def copied(run: Path, to: Path) -> Path:
    """A copy of an interrupted run; returns its resume folder."""
    (folder,) = (Path(shutil.copytree(run, to)) / "resume").iterdir()
    return folder


def test_a_checkpoint_put_in_the_wrong_folder_is_refused(interrupted_run: Path, tmp_path: Path) -> None:
    folder = copied(interrupted_run, tmp_path / "run")
    with pytest.raises(UserError, match=f"other settings or data.*{folder.name}.*start anew"):
        newest(folder, "0123456789abcdef")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "damaged", "first"), [(truncate, 1, 4), (flip, 1, 4), (truncate, 2, 0)])
def test_a_damaged_checkpoint_costs_steps_and_nothing_else(
    tokens: Path,
    interrupted_run: Path,
    tmp_path: Path,
    uninterrupted,
    trained: list[int],
    capsys,
    damage,
    damaged: int,
    first: int,
) -> None:
    expected = uninterrupted(make_job())
    folder = copied(interrupted_run, tmp_path / "run")
    newest = sorted(folder.glob("step-*.pt"), reverse=True)
    for path in newest[:damaged]:
        damage(path)
    trained.clear()
    assert resumed(make_job(), tokens, tmp_path / "run") == expected
    assert trained == list(range(first, STEPS))
    said = capsys.readouterr().err
    assert [f"{path} is damaged" in said for path in newest] == [k < damaged for k in range(2)]
    assert (f"falling back to {newest[1].name}" in said) == (damaged >= 1)
    assert ("starting anew" in said) == (damaged == 2)


def test_metrics_cut_short_behind_a_checkpoint_are_refused(tokens: Path, interrupted_run: Path, tmp_path: Path) -> None:
    folder = copied(interrupted_run, tmp_path / "run")
    os.truncate(folder / "metrics.jsonl", 10)
    with pytest.raises(UserError, match=r"metrics\.jsonl has 10 bytes, but its checkpoint needs \d+: .*resume"):
        pretrain(make_job(), tokens, tmp_path / "run", HARDWARE)


# --- divergence ---


def test_a_diverging_run_stops_by_name_and_is_not_repeated(tokens: Path, tmp_path: Path, trained, capsys) -> None:
    wild, run = make_job(lr=1e30), tmp_path / "run"
    assert main(command(wild, tokens, run, checkpointing(1))) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    stopped = trained[-1]
    assert 1 <= stopped < STEPS - 1
    assert said.startswith("tapernorm: all_aux d12 seed3: the ")
    assert f" is not finite at step {stopped};" in said
    (folder,) = (run / "resume").iterdir()
    assert newest(folder, folder.name) == stopped  # the state before the step that failed
    assert read_json(folder / "diverged.json")["step"] == stopped
    assert not (run / "result.json").exists()

    trained.clear()
    assert main(command(wild, tokens, run)) == 2
    warning, last = capsys.readouterr().err.splitlines()
    assert "1/m = 10 steps" in warning
    assert last == said
    assert trained == []

    assert main(command(make_job(), tokens, run)) == 0  # another config is not concerned
    assert trained == list(range(STEPS))


def test_removing_the_marker_lets_it_try_again(tokens: Path, tmp_path: Path, trained, capsys) -> None:
    wild = make_job(lr=1e30)
    assert main(command(wild, tokens, tmp_path)) == 2
    before = list(trained)
    (marker,) = tmp_path.glob("resume/*/diverged.json")
    assert str(marker) in capsys.readouterr().err
    marker.unlink()
    assert main(command(wild, tokens, tmp_path)) == 2
    assert before == [0, 1]
    assert trained[len(before) :] == [1]  # from the state that was kept at the divergence


@pytest.mark.parametrize(
    ("evaluation", "step", "then"),
    [(0, 5, "stopped before another update"), (2, 11, "it was the last step, and nothing is published")],
)
def test_a_validation_that_is_not_finite_stops_the_run(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: int, step: int, then: str
) -> None:
    """Weights may overflow in the very last update, which no training loss sees."""
    original = tapernorm_lab.training.plan.evaluate
    seen = 0

    def poisoned(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        nonlocal seen
        if seen == evaluation:
            with torch.no_grad():
                model.get_parameter("model.norm.weight").fill_(torch.inf)
                model.get_parameter("model.norm.gamma_t").fill_(torch.inf)
        seen += 1
        return original(model, *args, **options)

    monkeypatch.setattr(tapernorm_lab.training.plan, "evaluate", poisoned)
    with pytest.raises(Diverged, match=f"the validation cross-entropy is not finite at step {step}; {then}"):
        pretrain(SPARSE, tokens, tmp_path, HARDWARE)
    assert not (tmp_path / "result.json").exists()
    monkeypatch.setattr(tapernorm_lab.training.plan, "evaluate", original)
    with pytest.raises(Diverged, match=f"the validation cross-entropy is not finite at step {step}"):
        pretrain(SPARSE, tokens, tmp_path, HARDWARE)


# --- what cannot be written, and what does not fit ---


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow past `size` bytes: writes fall short, then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("size", "file", "job"), [(2000, "metrics.jsonl", make_job()), (8000, "step-000000", SPARSE)])
def test_a_file_that_cannot_grow_ends_the_run_with_one_line_and_a_retry_goes_on(
    tokens: Path, tmp_path: Path, uninterrupted, capsys, size: int, file: str, job: PretrainJob
) -> None:
    with file_size_limit(size):
        code = main(command(job, tokens, tmp_path, checkpointing(STEPS)))
    assert code == 2
    warning, said = capsys.readouterr().err.splitlines()
    assert "1/m = 10 steps" in warning
    assert said.startswith("tapernorm: cannot write ")
    assert file in said
    assert "ulimit -f" in said
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("step-*.pt"))
    assert resumed(job, tokens, tmp_path) == uninterrupted(job)


def test_a_full_disk_while_publishing_leaves_no_result_and_a_retry_publishes(
    tokens: Path, tmp_path: Path, uninterrupted, trained: list[int], capsys
) -> None:
    expected = uninterrupted(SPARSE)
    planned = tmp_path / f".model.safetensors.{os.getpid()}.partial"
    original = tapernorm_lab.training.run_folder.save

    def save(model: Any, out: Path) -> None:
        planned.symlink_to("/dev/full")  # every write to it fails for want of space
        original(model, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tapernorm_lab.training.run_folder, "save", save)
        assert main(command(SPARSE, tokens, tmp_path)) == 2
    assert "model.safetensors: the disk is full: free some space" in capsys.readouterr().err
    assert not planned.is_symlink()
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "result.json").exists()
    trained.clear()
    assert resumed(SPARSE, tokens, tmp_path) == expected
    assert trained == []


def test_cuda_asked_for_and_absent_is_refused(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = HARDWARE.model_copy(update={"device": "cuda"})
    with pytest.raises(UserError, match=r"sees no CUDA device; set hardware\.device to auto or cpu"):
        pretrain(make_job(), tokens, tmp_path / "run", cuda)
    assert not (tmp_path / "run").exists()


def test_tokens_of_another_vocabulary_are_refused(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocabulary of 61, .* 64: .*tapernorm tokens"):
        pretrain(make_job(vocab_size=64), tokens, tmp_path / "run", HARDWARE)
    assert not (tmp_path / "run").exists()


def test_a_stream_shorter_than_a_window_is_refused_before_any_work(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 900 tokens.* takes 1001"):
        pretrain(make_job(context=1000), tokens, tmp_path / "run", HARDWARE)
    assert not (tmp_path / "run").exists()


def test_a_second_trainer_is_refused_by_name(tokens: Path, tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        pretrain(make_job(), tokens, tmp_path, HARDWARE)
    pretrain(make_job(), tokens, tmp_path, HARDWARE)


def test_partial_files_of_killed_writers_are_cleared(tokens: Path, tmp_path: Path) -> None:
    pretrain(make_job(steps=4), tokens, tmp_path, HARDWARE)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / ".metrics.jsonl.1.partial").write_text("half")
    (tmp_path / ".partial").write_text("somebody's own")
    pretrain(make_job(steps=4), tokens, tmp_path, HARDWARE)
    assert leftovers(tmp_path) == [".partial"]


def test_a_finished_run_is_not_trained_again_unless_a_file_of_it_is_gone(tokens, tmp_path, trained, capsys) -> None:
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    before = outcome_of(tmp_path)
    trained.clear()
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    assert trained == []
    assert "nothing to do" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink()
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    assert len(trained) == STEPS
    assert outcome_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "damage"), [("model.safetensors", flip), ("metrics.jsonl", truncate), ("metrics.jsonl", Path.unlink)]
)
def test_a_finished_run_whose_files_are_damaged_says_which_and_trains_again(tokens, tmp_path, capsys, name, damage):
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    before, path = outcome_of(tmp_path), tmp_path / name
    damage(path)
    capsys.readouterr()
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    assert f"{path} is missing or damaged" in capsys.readouterr().err
    assert outcome_of(tmp_path) == before


def test_a_damaged_config_of_a_finished_run_is_written_again_without_training(tokens, tmp_path, trained) -> None:
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / "config.json").write_text("{")
    trained.clear()
    pretrain(make_job(), tokens, tmp_path, HARDWARE)
    assert (tmp_path / "config.json").read_bytes() == before
    assert trained == []


@pytest.mark.parametrize("content", ["{", '{"kind": "pretrain"}'])
def test_a_damaged_result_is_named_with_the_remedy(tokens, tmp_path, capsys, content: str) -> None:
    assert main(command(make_job(), tokens, tmp_path)) == 0
    (tmp_path / "result.json").write_text(content)
    capsys.readouterr()
    assert main(command(make_job(), tokens, tmp_path)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "result.json") in said
    assert "damaged" in said
    (tmp_path / "result.json").unlink()
    assert main(command(make_job(), tokens, tmp_path)) == 0


def test_a_folder_that_is_deleted_meanwhile_ends_the_run_at_its_next_checkpoint(tokens, tmp_path, monkeypatch, capsys):
    run, original = tmp_path / "run", Trainer.step

    def step(self: Trainer, k: int) -> dict[str, Any]:
        if k == 5:
            shutil.rmtree(run)
        return original(self, k)

    monkeypatch.setattr(Trainer, "step", step)
    assert main(command(make_job(), tokens, run, checkpointing(4))) == 2
    assert f"{run} was deleted or moved" in capsys.readouterr().err.splitlines()[-1]
    assert not run.exists()


def test_the_code_that_ran_is_named_not_the_code_that_lies_there_at_the_end(tokens: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tapernorm_lab.training.run_folder, "code_commit", lambda: "as it started")
    monkeypatch.setattr(tapernorm.util.provenance, "code_commit", lambda: "pulled meanwhile")
    result = pretrain(make_job("baseline", steps=4), tokens, tmp_path / "run", HARDWARE)
    assert result["provenance"]["commit"] == "as it started"
