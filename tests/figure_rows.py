"""Made-up rows of every figure, and the jobs that tell of their runs."""

from pathlib import Path
from types import SimpleNamespace

import synthetic
import synthetic_bench
import synthetic_gpt2
import synthetic_robustness
import synthetic_study
from own_runs import write_run

from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.config.odd_inputs import OddInputsReportJob
from tapernorm_lab.config.variants import VARIANTS
from tapernorm_lab.report.frames import decoding, gpt2, odd_inputs, own_models, pretraining, study_stages

SEEDS = (0, 1, 2, 3)
STEPS = {"pretraining": 300, "finetuning": 130}
CAPTION = "Embedded demo on real text: not the paper's scale."
JOB = ReportJob(run="demo", caption=CAPTION, labels={64: "1M", 128: "3M"}, clip_norm=1.0)
TRIALS = OddInputsReportJob(run="demo", caption=CAPTION, stage=None, cells=(), models=synthetic_robustness.LABELS)


def rows(folder: Path) -> SimpleNamespace:
    """The rows of each figure, of result files that are written into the folder."""
    paths = synthetic.write_run(folder, VARIANTS, (128,), SEEDS, steps=STEPS["pretraining"])
    paths += synthetic.write_run(folder, ("baseline", "internal_aux"), (64,), SEEDS, steps=120)
    fine = synthetic_gpt2.write_run(folder / "gpt2", seeds=SEEDS[:3], steps=STEPS["finetuning"])
    bench = synthetic_bench.write(synthetic_bench.decode(prompts=(128, 512), rounds=9), folder / "bench.json")
    odd = synthetic_robustness.write_run(folder / "odd", seeds=SEEDS[1:])
    stage = study_stages.collect(synthetic_study.write_stage(folder / "stage"), folder / "stage")
    scaled = (stage["variant"] != "baseline") & (stage["outcome"] == "finished")
    own = own_models.collect({"mine": write_run(folder / "own", after=3.0)}, run="tiny", caption="A trial.")
    return SimpleNamespace(
        pretraining=pretraining.collect(paths, run="demo"),
        finetuning=gpt2.collect(*fine, run="demo"),
        decoding=decoding.read(bench, kind=decoding.DECODE),
        odd_inputs=odd_inputs.collect(odd, run="demo"),
        windows=stage,
        targets=stage.assign(scale_target=stage["seed"].astype(float).where(scaled)),  # 1, 2, 3
        token_scales=own,
    )
