"""A training asked to stop finishes its micro-batch and goes on bitwise; a second signal ends it at once."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import builders
import pytest
import torch
import torch.distributed as dist
from builders import snapshot
from crashing import nothing, run_apart
from ranked import make_trainer, together, train
from training import START, STEPS, TIMES, checkpointing, command, leftovers, make_job, outcome_of, write_stream

from tapernorm_lab.experiments.taper_start_jump import ScoredTaper
from tapernorm_lab.training import stop_signals as stopping
from tapernorm_lab.training import validation_loss as evaluate
from tapernorm_lab.training.stop_signals import Stopped, requested, stoppable, until_safe
from tapernorm_lab.training.validation_loss import Evaluation

NEVER = checkpointing(1000)  # no checkpoint but the one that a signal causes
MICRO = NEVER.model_copy(update={"micro_batch": 1})  # four micro-batches a step
EVALUATED = make_job(eval_every=2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    return finished(make_job(), tokens, tmp_path_factory.mktemp("undisturbed"), NEVER)


def finished(job, tokens, folder, hardware):
    """The outcome of a run that nothing stops."""
    assert run_apart(nothing, command(job, tokens, folder / "run", hardware), folder / "log") == 0
    return outcome_of(folder / "run")


def signals_in_step(step: int, *numbers: int, pause_s: float = 0.0) -> None:
    """Sabotage: the process gets these signals within optimizer step `step`, after its update."""
    import time

    from tapernorm_lab.training.trainer import Trainer

    original = Trainer.step

    def step_of(self, k):
        row = original(self, k)
        if k == step:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(pause_s)
        return row

    Trainer.step = step_of


def signal_in_micro_batch(step: int, number: int, *, asks: bool = True) -> None:
    """Sabotage: SIGTERM in the forward pass of that micro-batch; each pass says where it is.

    Args:
        asks: the trainer asks between micro-batches.
    """
    from tapernorm_lab.training import trainer as train

    original, passes = train.training_loss, iter(range(10_000))

    def loss(*arguments):
        place = divmod(next(passes), 4)
        os.write(2, f"micro-batch {place[1]} of step {place[0]}\n".encode())
        if place == (step, number):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    train.training_loss = loss
    if not asks:
        train.stop_if_asked = lambda: None


def signal_in_validation(step: int, piece: int) -> None:
    """Sabotage: SIGTERM before that piece of the validation after step `step`; each piece says where it is."""
    from tapernorm_lab.training import validation_loss as evaluate

    original, passes = evaluate.scoring_windows, iter(range(1, 10_000))

    def windows(*arguments, **options):
        after = EVALUATED.train.eval_every * next(passes) - 1
        for number, window in enumerate(original(*arguments, **options)):
            os.write(2, f"piece {number} after step {after}\n".encode())
            if (after, number) == (step, piece):
                os.kill(os.getpid(), signal.SIGTERM)
            yield window

    evaluate.scoring_windows = windows


def impatient(step: int, *numbers: int) -> None:
    """Sabotage: as `signals_in_step`, and no two signals are the same one."""
    stopping._SAME_S = 0.0
    signals_in_step(step, *numbers, pause_s=0.01)


def signal_in_last_evaluation() -> None:
    """Sabotage: SIGTERM while the finished model is scored."""
    original = evaluate.scoring_windows

    def windows(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **options)

    evaluate.scoring_windows = windows


def signal_while_tidying(*, ignored: bool) -> None:
    """Sabotage: SIGTERM when all results are written and the checkpoints are about to go, ignored or not."""
    from tapernorm_lab.training import run_folder

    original = run_folder.discard

    def discard(path):
        if path.name == "resume":
            os.kill(os.getpid(), signal.SIGTERM)
        original(path)

    run_folder.discard = discard
    if not ignored:
        run_folder.too_late = nothing


def rows_of(metrics: Path) -> list[dict]:
    """The rows of a growing metrics file, their times apart."""
    rows = map(json.loads, metrics.read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def checkpoints(run: Path) -> list[int]:
    """The optimizer steps that checkpoints were written after."""
    return sorted(int(path.name.split(".")[0].removeprefix("step-")) for path in run.glob("resume/*/step-*.pt"))


def stopped(sabotage, arguments, run: Path, code: int = 143) -> str:
    """What a run says that ends with this code; its results are not there."""
    log = run.with_suffix(".log")
    assert run_apart(sabotage, arguments, log) == code
    assert leftovers(run) == ["resume"]
    return log.read_text()


def gone_on(arguments, run: Path):
    """The outcome of the same command again."""
    assert run_apart(nothing, arguments, run.with_suffix(".log")) == 0
    assert leftovers(run) == []
    return outcome_of(run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_at_hand_and_the_same_command_goes_on_bitwise(
    tmp_path, tokens, undisturbed, number, code
):
    run = tmp_path / "run"
    arguments = command(make_job(), tokens, run, NEVER)
    said = stopped(partial(signals_in_step, 5, number), arguments, run, code)
    assert f"{number.name}: stopping after this micro-batch" in said
    assert checkpoints(run) == [6]
    assert gone_on(arguments, run) == undisturbed
    assert f"resuming after step 6 of {STEPS}" in run.with_suffix(".log").read_text()


@pytest.fixture(scope="module")
def undisturbed_in_micro_batches(tokens, tmp_path_factory):
    return finished(make_job(), tokens, tmp_path_factory.mktemp("micro"), MICRO)


@pytest.mark.parametrize(
    ("step", "number", "kept"),
    [(0, 1, []), (2, 0, [2]), (START, 2, [START]), (STEPS - 1, 1, [STEPS - 1]), (5, 3, [6])],  # 3: the last one
)
def test_a_signal_within_a_step_drops_it_after_the_micro_batch_and_the_step_is_done_again_bitwise(
    tmp_path, tokens, undisturbed_in_micro_batches, step, number, kept
):
    """Before, at and after the step that calibrates; what the norms observed in the dropped step is dropped as well."""
    run = tmp_path / "run"
    arguments = command(make_job(), tokens, run, MICRO)
    said = stopped(partial(signal_in_micro_batch, step, number), arguments, run).splitlines()
    passes = [line for line in said if line.startswith("micro-batch ")]
    assert passes[-1] == f"micro-batch {number} of step {step}"
    assert checkpoints(run) == kept
    assert gone_on(arguments, run) == undisturbed_in_micro_batches


def test_a_trainer_that_did_not_ask_between_micro_batches_would_finish_the_step(tmp_path, tokens):
    """The control: there, the question between two micro-batches alone dropped the step."""
    run = tmp_path / "run"
    stopped(partial(signal_in_micro_batch, 5, 1, asks=False), command(make_job(), tokens, run, MICRO), run)
    assert checkpoints(run) == [6]


@pytest.fixture(scope="module")
def undisturbed_and_evaluated(tokens, tmp_path_factory):
    return finished(EVALUATED, tokens, tmp_path_factory.mktemp("evaluated"), NEVER)


@pytest.mark.parametrize(
    ("step", "piece", "hardware"), [(1, 0, NEVER), (5, 1, checkpointing(2)), (STEPS - 1, 2, NEVER)]
)
def test_a_signal_within_a_validation_ends_it_and_it_is_done_again_bitwise(
    tmp_path, tokens, undisturbed_and_evaluated, step, piece, hardware
):
    """Whether or not a checkpoint is due at that step."""
    run = tmp_path / "run"
    arguments = command(EVALUATED, tokens, run, hardware)
    said = stopped(partial(signal_in_validation, step, piece), arguments, run).splitlines()
    assert [line for line in said if line.startswith("piece ")][-1] == f"piece {piece} after step {step}"
    assert checkpoints(run)[-1] == step + 1
    (path,) = run.glob("resume/*/metrics.jsonl")
    assert rows_of(path)[-1].items() >= {"step": step}.items()
    assert "valid_ce" not in rows_of(path)[-1]
    assert gone_on(arguments, run) == undisturbed_and_evaluated


def test_a_taper_that_is_stopped_while_it_scores_its_start_scores_it_again():
    def driven(stops: int):
        model, driver = builders.attached_as(ScoredTaper)
        builders.observe(model, driver, builders.tokens())
        losses = iter([*[None] * stops, 3.0, 5.0])

        def validate():
            if (loss := next(losses)) is None:
                raise Stopped(signal.SIGTERM)
            return Evaluation(loss, 1, None)

        driver.validate = validate
        return driver, model

    scored, model = driven(stops=1)
    with pytest.raises(Stopped):
        scored.set_step(builders.SCHEDULE.start)
    assert not scored.calibrated
    assert scored.gate.item() == 1
    scored.set_step(builders.SCHEDULE.start)
    other, undisturbed = driven(stops=0)
    other.set_step(builders.SCHEDULE.start)
    assert scored.losses == other.losses == (3.0, 5.0)
    assert scored.constants == other.constants
    assert snapshot(model.state_dict()) == snapshot(undisturbed.state_dict())


# Several processes


def stopped_in(step: int, call: int, *arguments, where: str, **options):
    """What rank 1 and rank 0 have done when rank 1 gets SIGTERM in that forward pass of step `step`."""
    trainer = make_trainer(*arguments, **options)
    seen = []

    def noting(name, original):
        def noted(*given, **named):
            seen.append(name)
            if name == where and seen.count(name) == call and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*given, **named)

        return noted

    trainer.loss = noting("micro-batch", trainer.loss)
    evaluate.logits_of = noting("piece", evaluate.logits_of)
    with stoppable():
        try:
            trainer.run()
        except Stopped as stopped:
            return seen, str(stopped), sorted(path.name.split(".")[0] for path in arguments[1].glob("step-*.pt"))
    raise AssertionError("it went on")


@pytest.mark.parametrize(
    ("where", "call", "kept"),
    [
        ("micro-batch", 2 * 6 + 1, 6),  # the first of two micro-batches of step 6
        ("micro-batch", 2 * 5 + 1, 5),  # of the step that calibrates
        ("piece", 2, 7),  # of three pieces a rank, after step 6
    ],
)
def test_ranks_stop_after_the_same_micro_batch_or_piece_whichever_was_asked(tmp_path, where, call, kept):
    options = {"micro_batch": 2, "dropout": 0.1, "checkpoint_every": 1000}
    undisturbed, _ = together(tmp_path / "one", train, "gpt2", tmp_path / "one" / "run", **options)
    arguments = ("gpt2", tmp_path / "run")
    one, other = together(tmp_path / "two", stopped_in, kept, call, *arguments, where=where, **options)
    assert one == other
    seen, said, checkpoints_ = one
    assert seen.count(where) == call
    assert seen[-1] == where
    assert "SIGTERM" in said
    assert checkpoints_ == [f"step-{kept:08}"]
    resumed, again = together(tmp_path / "three", train, *arguments, **options)
    assert resumed[1] == undisturbed[1][kept:]
    assert resumed[2] == again[2] == undisturbed[2]
    for name, value in undisturbed[0].items():
        assert torch.equal(resumed[0][name].nan_to_num(), value.nan_to_num()), name
    assert rows_of(tmp_path / "run/metrics.jsonl") == rows_of(tmp_path / "one/run/metrics.jsonl")


def test_the_same_request_by_two_ways_is_one(tmp_path, tokens):
    """A scheduler that signals every process of a job, and a launcher that passes its own signal on."""
    run = tmp_path / "run"
    twice = partial(signals_in_step, 5, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    stopped(twice, command(make_job(), tokens, run, NEVER), run)
    assert checkpoints(run) == [6]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_where_it_stands(tmp_path, tokens, undisturbed, second):
    run = tmp_path / "run"
    arguments = command(make_job(), tokens, run, checkpointing(4))
    stopped(partial(impatient, 5, signal.SIGTERM, second), arguments, run, -second)
    assert checkpoints(run) == [4]
    assert gone_on(arguments, run) == undisturbed


def test_outside_the_steps_it_stops_at_once_and_leaves_nothing_half_written(tmp_path, tokens, undisturbed):
    run = tmp_path / "run"
    arguments = command(make_job(), tokens, run, NEVER)
    stopped(signal_in_last_evaluation, arguments, run)
    assert checkpoints(run) == [STEPS]
    assert gone_on(arguments, run) == undisturbed


@pytest.mark.parametrize(("ignored", "code", "left"), [(True, 0, []), (False, 143, ["resume"])])
def test_a_signal_after_the_result_is_written_comes_too_late(tmp_path, tokens, undisturbed, ignored, code, left):
    """Else the job would fail, its results be deleted by the workflow engine, and its checkpoints be gone."""
    run = tmp_path / "run"
    arguments = command(make_job(), tokens, run, NEVER)
    assert run_apart(partial(signal_while_tidying, ignored=ignored), arguments, tmp_path / "log") == code
    assert outcome_of(run) == undisturbed
    assert leftovers(run) == left


def test_every_verb_stops_at_a_signal():
    with pytest.raises(Stopped) as stopped, stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 143
    assert not isinstance(stopped.value, Exception), "`except Exception` must not swallow it"


def wait_until_safe(error: type[Exception] | None = None) -> None:
    with until_safe():
        assert requested() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert requested() is signal.SIGINT
        if error is not None:
            raise error


@pytest.mark.parametrize(("error", "ends_as"), [(None, Stopped), (ZeroDivisionError, ZeroDivisionError)])
def test_until_safe_notes_a_signal_and_stops_at_its_end_unless_there_was_an_error(capfd, error, ends_as):
    with stoppable(), pytest.raises(ends_as):
        wait_until_safe(error)
    assert "stopping after this micro-batch" in capfd.readouterr().err


def test_handlers_and_requests_do_not_outlive_their_block():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with pytest.raises(Stopped), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    assert requested() is None
