"""A training asked to stop keeps its last step and goes on from it, bitwise; a second signal ends it at once."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from crashing import nothing, run_apart
from training import STEPS, checkpointing, command, leftovers, make_job, outcome_of, write_stream

from tapernorm import stopping
from tapernorm.stopping import Stopped, requested, stoppable, until_safe

NEVER = checkpointing(1000)  # no checkpoint but the one that a signal causes


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_apart(nothing, command(make_job(), tokens, folder / "run", NEVER), folder / "log") == 0
    return outcome_of(folder / "run")


def signals_in_step(step: int, *numbers: int, pause_s: float = 0.0) -> None:
    """Sabotage: the process gets these signals within optimizer step `step`, after its update."""
    import time

    from tapernorm.train import Trainer

    original = Trainer.step

    def step_of(self, k):
        row = original(self, k)
        if k == step:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(pause_s)
        return row

    Trainer.step = step_of


def deaf(step: int) -> None:
    """Sabotage: SIGTERM in step `step`, and a trainer that does not ask."""
    from tapernorm import train

    train.requested = lambda: None
    signals_in_step(step, signal.SIGTERM)


def impatient(step: int, *numbers: int) -> None:
    """Sabotage: as `signals_in_step`, and no two signals are the same one."""
    stopping._SAME_S = 0.0
    signals_in_step(step, *numbers, pause_s=0.01)


def signal_in_last_evaluation(number: int) -> None:
    """Sabotage: the signal comes while the finished model is scored."""
    from tapernorm import evaluate

    original = evaluate.scoring_windows

    def windows(*args, **options):
        os.kill(os.getpid(), number)
        return original(*args, **options)

    evaluate.scoring_windows = windows


def signal_while_tidying(number: int) -> None:
    """Sabotage: the signal comes when all results are written and the checkpoints are about to go."""
    from tapernorm import training_run

    original = training_run.discard

    def discard(folder):
        os.kill(os.getpid(), number)
        original(folder)

    training_run.discard = discard


def never_too_late(number: int) -> None:
    """Sabotage: the same, and a run that stops even then."""
    from tapernorm import training_run

    training_run.too_late = nothing
    signal_while_tidying(number)


def checkpoints(run: Path) -> list[int]:
    """The optimizer steps that checkpoints were written after."""
    return sorted(int(path.name.split(".")[0].removeprefix("step-")) for path in run.glob("resume/*/step-*.pt"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_at_hand_and_the_same_command_goes_on_bitwise(
    tmp_path, tokens, undisturbed, number, code
):
    arguments = command(make_job(), tokens, tmp_path / "run", NEVER)
    assert run_apart(partial(signals_in_step, 5, number), arguments, tmp_path / "log") == code
    said = (tmp_path / "log").read_text()
    assert f"{number.name}: stopping after this step; a second one ends it at once" in said
    assert "the same command goes on, training from its last checkpoint" in said
    assert checkpoints(tmp_path / "run") == [6]
    assert leftovers(tmp_path / "run") == ["resume"]
    assert not (tmp_path / "run/result.json").exists()
    assert run_apart(nothing, arguments, tmp_path / "log") == 0
    assert f"resuming after step 6 of {STEPS}" in (tmp_path / "log").read_text()
    assert outcome_of(tmp_path / "run") == undisturbed
    assert leftovers(tmp_path / "run") == []


def test_a_trainer_that_did_not_ask_would_train_to_the_end(tmp_path, tokens):
    """The control of the test above: there, the trainer's question alone stopped it at step 6."""
    arguments = command(make_job(), tokens, tmp_path / "run", NEVER)
    assert run_apart(partial(deaf, 5), arguments, tmp_path / "log") == 143
    assert checkpoints(tmp_path / "run") == [STEPS]


def test_the_same_request_by_two_ways_is_one(tmp_path, tokens):
    """A scheduler that signals every process of a job, and a launcher that passes its own signal on."""
    arguments = command(make_job(), tokens, tmp_path / "run", NEVER)
    twice = partial(signals_in_step, 5, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert run_apart(twice, arguments, tmp_path / "log") == 143
    assert checkpoints(tmp_path / "run") == [6]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_where_it_stands(tmp_path, tokens, undisturbed, second):
    arguments = command(make_job(), tokens, tmp_path / "run", checkpointing(4))
    assert run_apart(partial(impatient, 5, signal.SIGTERM, second), arguments, tmp_path / "log") == -second
    assert checkpoints(tmp_path / "run") == [4]
    assert run_apart(nothing, arguments, tmp_path / "log") == 0
    assert outcome_of(tmp_path / "run") == undisturbed


def test_outside_the_steps_it_stops_at_once_and_leaves_nothing_half_written(tmp_path, tokens, undisturbed):
    arguments = command(make_job(), tokens, tmp_path / "run", NEVER)
    assert run_apart(partial(signal_in_last_evaluation, signal.SIGTERM), arguments, tmp_path / "log") == 143
    assert checkpoints(tmp_path / "run") == [STEPS]
    assert leftovers(tmp_path / "run") == ["resume"]
    assert run_apart(nothing, arguments, tmp_path / "log") == 0
    assert outcome_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(("sabotage", "code"), [(signal_while_tidying, 0), (never_too_late, 143)])
def test_a_signal_after_the_result_is_written_comes_too_late(tmp_path, tokens, undisturbed, sabotage, code):
    """Else the job would fail, its results be deleted by the workflow engine, and its checkpoints be gone."""
    arguments = command(make_job(), tokens, tmp_path / "run", NEVER)
    assert run_apart(partial(sabotage, signal.SIGTERM), arguments, tmp_path / "log") == code
    assert outcome_of(tmp_path / "run") == undisturbed
    assert leftovers(tmp_path / "run") == ([] if code == 0 else ["resume"])


def test_every_verb_stops_at_a_signal():
    with pytest.raises(Stopped) as stopped, stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 143
    assert not isinstance(stopped.value, Exception), "`except Exception` must not swallow it"


def wait_until_safe() -> None:
    with until_safe():
        assert requested() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert requested() is signal.SIGINT


def fail_when_asked() -> None:
    with until_safe():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError


def test_until_safe_notes_a_signal_and_stops_at_its_end(capfd):
    with stoppable(), pytest.raises(Stopped):
        wait_until_safe()
    assert "stopping after this step" in capfd.readouterr().err


def test_an_error_inside_until_safe_stays_that_error():
    with stoppable(), pytest.raises(ZeroDivisionError):
        fail_when_asked()


def test_handlers_and_requests_do_not_outlive_their_block():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with pytest.raises(Stopped), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    assert requested() is None
