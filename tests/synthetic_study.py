"""A made-up stage: its job, and the result files of its runs with losses that are given."""

import json
import math
from pathlib import Path
from typing import Any

import synthetic
from training import make_arm

from tapernorm_lab.config.study import Arm, Stage
from tapernorm_lab.config.study_runs import ArmRun, StageJob

SEEDS = (1, 2, 3)
TAPER = {"start_fraction": 0.05, "end_fraction": 1.0, "ema_rate": 0.01, "anchor_weight": 0.1}
BASELINE = {1: 3.0, 2: 2.0, 3: 4.0}
LATER = {1: 2.97, 2: 2.0, 3: 3.92}  # -1, 0 and -2 %
# arm -> its losses by seed; None: diverged
LOSSES: dict[str, dict[int, float | None]] = {
    "baseline": {**BASELINE},
    "slow": {1: 2.9, 2: 1.99, 3: 3.9},
    "papers": {1: 3.03, 2: 2.04, 3: 4.06},
    "later": {**LATER},
    "wild": {1: None, 2: 2.1, 3: None},
    "tempered": {1: 2.5, 2: 1.5, 3: 3.5},
    "relative": {1: 2.94, 2: 1.99, 3: 3.96},
}


def window(start: float, end: float) -> dict[str, float]:
    return {"taper.start_fraction": start, "taper.end_fraction": end}


def arms() -> list[Arm]:
    return [
        make_arm("baseline", name="baseline", label="Baseline"),
        make_arm("baseline", name="slow", label="Baseline, half the rate", set={"train.lr": 0.0015}),
        make_arm("all_aux", name="papers", label="All-Taper (+aux)"),
        make_arm("all_aux", name="later", label="All-Taper (+aux)", set=window(0.3, 0.7)),
        make_arm("internal_aux", name="wild", label="Internal-Taper (+aux)", set=window(0.3, 0.5)),
        make_arm("baseline", name="tempered", label="Tempered", treatment={"temperature": True}),
        make_arm("all_relative", name="relative", label="Relative"),
    ]


def stage_job(**changes: Any) -> StageJob:
    """The job of the stage; two arms' runs lie where pre-trainings do."""
    stage = Stage(
        name="S1",
        title="A question",
        search=False,
        figure="window",
        d_model=64,
        seeds=SEEDS,
        baseline="baseline",
        arms=tuple(arms()),
    )
    lies_in = {arm.name: f"study/S1/{arm.name}" for arm in stage.arms}
    lies_in |= {"baseline": "pretrain/baseline/d64", "papers": "pretrain/all_aux/d64"}
    runs = [
        ArmRun(arm=arm, seed=seed, folder=f"{folder}/seed{seed}", config_hash=f"{arm}{seed}")
        for arm, folder in lies_in.items()
        for seed in SEEDS
    ]
    job = StageJob(run="demo", caption="Embedded demo.", stage=stage, runs=tuple(runs))
    return job.model_copy(update=changes)


def write_stage(results: Path) -> StageJob:
    """The result files of every run below `results`."""
    job = stage_job()
    for run in job.runs:
        arm, loss = job.stage.arm(run.arm), LOSSES[run.arm][run.seed]
        document = synthetic.result(arm.variant.name, 64, run.seed, valid_ce=math.nan if loss is None else loss)
        document["job"]["train"] |= {"clip_norm": 1.0}
        document["job"]["taper"] = None if arm.variant.plain else dict(TAPER)
        for name, value in arm.set.items():
            section, key = name.split(".")
            document["job"][section][key] = value
        document["provenance"]["config_hash"] = run.config_hash
        if run.folder.startswith("study/"):
            document |= {"kind": "arm", "job": {"pretrain": document["job"], "treatment": None}}
            if arm.variant.tapers:
                document["taper_start"] = {"taper_start_jump": {"value": 0.01 * run.seed, "unit": "nats/token"}}
        if loss is None:
            document |= {"values": {}, "diverged": {"step": 7 * run.seed, "what": "the cross-entropy"}}
            for absent in ("taper_start", "scale_target"):
                document.pop(absent, None)
        folder = results / run.folder
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(document))
    return job
