"""A server process that has imported what is slow to import, and that is forked for each command of a test.

Python keeps one such server per process, and its list of imports holds once it runs: so one list serves all tests.
"""

import multiprocessing

FORK = multiprocessing.get_context("forkserver")
# Training steps import torch._dynamo, and a GPT-2 its part of transformers.
TRAINING = ["tapernorm_lab.experiments.pretrain", "tapernorm_lab.experiments.finetune", "torch._dynamo"]
WORKFLOW = ["snakemake.cli", "snakemake.report", "snakemake.scheduling.job_scheduler", "smart_open", "jsonschema"]
FORK.set_forkserver_preload([*TRAINING, *WORKFLOW, "tapernorm_lab.cli.main", "tapernorm_lab.data.sources"])
