"""The horizon of the running means: derived or given, what identifies a job, and the warning of a long one."""

import re

import pytest
from places import ROOT
from training import make_job

from tapernorm_lab.config.jobs import PretrainJob, horizon_warning
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.run_cost import Speed, cost_text
from tapernorm_lab.config.sections import TaperConfig
from tapernorm_lab.config.study import changed

TAPER = {"start_fraction": 0.05, "end_fraction": 1.0, "anchor_weight": 0.1}


def rate_of(steps: int, **taper: float | None) -> float:
    return make_job(steps=steps).ema_rate_of(TaperConfig(**{**TAPER, **taper}))


def test_a_derived_rate_is_that_of_the_fraction_of_the_warm_up():
    lengths = (100_000, 200_000, 300_000)
    assert [round(rate_of(steps, ema_rate=None), 4) for steps in lengths] == [0.01, 0.005, 0.0033]
    assert [rate_of(steps, ema_rate=None, ema_horizon=0.2) for steps in (400, 100)] == [
        0.25,
        0.5,
    ]  # 4 and 1: at least 2


def test_a_rate_that_is_given_wins():
    assert rate_of(200_000, ema_rate=0.3) == rate_of(200_000, ema_rate=0.3, ema_horizon=0.5) == 0.3


def test_a_job_is_identified_by_what_is_in_force_alone():
    given = [TaperConfig(**TAPER, ema_rate=0.1, ema_horizon=horizon).model_dump() for horizon in (0.02, 0.5)]
    assert given[0] == given[1] == {**TAPER, "ema_rate": 0.1}
    derived = [TaperConfig(**TAPER, ema_rate=None, ema_horizon=horizon).model_dump() for horizon in (0.02, 0.5)]
    assert derived == [{**TAPER, "ema_rate": None, "ema_horizon": horizon} for horizon in (0.02, 0.5)]
    job = make_job(ema_rate=None)
    assert PretrainJob.model_validate_json(job.model_dump_json()) == job


def test_an_arm_may_give_the_rate_of_a_derived_base():
    base = make_job(ema_rate=None)
    arm = changed(base, {"taper.ema_rate": 0.01})
    assert arm.taper is not None
    assert (arm.ema_rate_of(arm.taper), arm.taper.model_dump().keys()) == (0.01, {*TAPER, "ema_rate"})
    wider = changed(base, {"taper.ema_horizon": 0.5})
    assert wider.taper is not None
    assert wider.taper.ema_horizon == 0.5
    with pytest.raises(ValueError, match=r"cannot set taper\.ema_rat,"):
        changed(base, {"taper.ema_rat": 0.01, "taper.x": 1.0})


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]


def test_a_horizon_above_a_tenth_of_the_warm_up_is_told_with_both():
    job = make_job(steps=1000, start_fraction=0.06, ema_rate=0.01)
    assert {100.0, 60.0} <= set(numbers(horizon_warning([job]) or ""))
    at_a_tenth = make_job(steps=1000, start_fraction=0.06, ema_rate=1 / 6)
    assert horizon_warning([at_a_tenth]) is None
    assert horizon_warning([make_job(steps=1000, start_fraction=0.06, ema_rate=None)]) is None
    assert horizon_warning([make_job("baseline", steps=1000)]) is None  # it has no means
    assert horizon_warning([]) is None
    both = horizon_warning([at_a_tenth, job, make_job(steps=1000, start_fraction=0.4, ema_rate=0.02)]) or ""
    assert {2.0, 3.0, 50.0, 100.0, 60.0, 400.0} <= set(numbers(both))


@pytest.mark.parametrize(("name", "warned"), [("demo", True), ("cpu", True), ("paper", False)])
def test_a_plan_tells_it_once(name, warned):
    text = cost_text(load_config(ROOT / f"config/{name}.yaml"), Speed(None, {}))
    assert text.count("taper.ema_rate") == warned
