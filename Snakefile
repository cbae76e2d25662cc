# Tables 1-3 and Figures 1-2 of the paper:   snakemake --cores all tables figures
# A single one of them:                   snakemake --cores all figure2
# Another scale (targets come first):     snakemake --cores all tables --configfile config/paper.yaml
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version, validate

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json
from tapernorm_lab.config import load as settings
from tapernorm_lab.config.run import Config
from tapernorm_lab.config.variants import VARIANTS
from tapernorm_lab.data.sources import files_of

min_version("9.0")


configfile: "config/demo.yaml"


report: "workflow/report/workflow.rst"


# Snakemake merges a --configfile into the default above. A setting that it leaves out would silently be the demo's, so
# each one must be complete by itself.
try:
    for path in workflow.configfiles:
        settings.load_config(path)
    RUN = settings.parse(Config, config, "the config")
    OWN_FILES = {data: files_of(data) for data in RUN.texts}
except UserError as error:
    raise WorkflowError(str(error)) from None
for path in (path for paths in OWN_FILES.values() for path in paths):
    if "{" in str(path) or "}" in str(path):
        raise WorkflowError(
            f"data.files: {path} has a brace in its name, which Snakemake takes for a wildcard; rename the file"
        )


# The same rules as JSON schema, exported from that model; editors check YAML files against it.
validate(
    RUN.model_dump(mode="json"),
    "workflow/schemas/config.schema.json",
    set_default=False,
)

# Jobs find `tapernorm` beside the Python that runs Snakemake, activated or not.
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")]))

RESULTS = f"results/{RUN.run}"
FIGURES = f"figures/{RUN.run}"
LOGS = f"{RESULTS}/logs"


wildcard_constraints:
    variant="|".join(VARIANTS),
    width=r"\d+",
    seed=r"\d+",


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/fold.smk"
include: "workflow/rules/bench.smk"


if RUN.gpt2:

    include: "workflow/rules/gpt2.smk"


if RUN.study:

    include: "workflow/rules/study.smk"


if RUN.robustness:

    include: "workflow/rules/robustness.smk"


include: "workflow/rules/report.smk"
include: "workflow/rules/targets.smk"


rule all:
    default_target: True
    input:
        TARGETS["tables"],
        TARGETS["figures"],


onstart:
    print(
        f"{RUN.run}: {len(RUN.pretrain_cells())} pre-trainings, {len(RUN.finetune_cells())} fine-tunes. {RUN.caption}",
        file=sys.stderr,
    )
