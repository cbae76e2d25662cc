"""What dry runs plan for a config and a profile, what they refuse, and what an edit starts anew."""

import functools
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from places import ROOT
from snakemake_runs import ABSENT, planned, project, resources_of, snakemake, write_config

from tapernorm_lab.config.job_cost import Load, limit_min, memory_mb
from tapernorm_lab.config.load import load_config

CORPUS = "results/test/data/corpus/manifest.json"
TEST = ("--configfile", "config/test.yaml")
PAPER = ("--configfile", "config/paper.yaml", "--nolock")


@functools.cache
def paper(profile: str) -> subprocess.CompletedProcess[str]:
    """A dry run of the paper's tables and figures."""
    gpus = ("--resources", "gpu=16") if profile == "gpu" else ()  # its own one is less than the largest job takes
    return snakemake(ROOT, "-n", "tables", "figures", "--workflow-profile", f"profiles/{profile}", *gpus, *PAPER)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project for calls that leave nothing in it but configs and files of their own names."""
    return project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize("profile", ["default", "gpu", "slurm"])
def test_every_profile_plans_every_run_of_the_paper(profile):
    jobs = {"pretrain": 6 * (4 * 3 + 2), "fold": 6 * (4 * 2 + 2)}  # six seeds: three variants, at one width two more
    data = {"corpus": 2, "tokenizer": 2, "tokens": 2, "scored_tokens": 2}  # to pre-train on, and for GPT-2
    gpt2 = {"base": 4, "published": 2 * 4, "finetune": 4 * 4, "finetune_fold": 3 * 4}  # four sizes, four methods
    scored = {"evaluate": 4 * 4, "evaluate_base": 4 + 2 * 4}
    report = {
        "bench": 2,
        "rows_training": 1,
        "rows_gpt2": 1,
        "int8_rows": 1,
        "table": 9,
        "figure": 5,
        "tables": 1,
        "figures": 1,
    }
    assert planned(paper(profile)) == jobs | data | gpt2 | scored | report


def test_a_slurm_job_asks_for_a_gpu_and_for_what_its_model_and_steps_need():
    config = load_config(ROOT / "config/paper.yaml")
    asked = {path.removeprefix("results/paper/"): found for path, found in resources_of(paper("slurm")).items()}
    limits = []
    for width in config.widths:
        found = asked[f"pretrain/all_aux/d{width.d_model}/seed3/result.json"]
        load = Load.of_pretraining(config.pretrain_job("all_aux", width.d_model, 3), config.hardware)
        assert found["gpu"] == "1"
        assert found["runtime"] == str(limit_min(load, config.hardware))
        assert found["mem_mb"] == str(memory_mb(load, config.hardware))
        assert found["slurm_extra"] == "--signal=TERM@120"
        limits.append(int(found["runtime"]))
    assert limits == sorted(limits)
    found = asked["finetune/all_aux/xl/seed1/result.json"]
    assert (found["gpu"], found["nodes"]) == ("4", "1")  # of one machine
    hardware = config.finetune_hardware("xl")
    load = Load.of_finetune(config.finetune_job("all_aux", "xl", 1), config.base_job("xl"), None, hardware)
    assert (found["mem_mb"], found["runtime"]) == (str(memory_mb(load, hardware)), str(limit_min(load, hardware)))
    assert int(found["mem_mb"]) > 60_000  # each of four processes reads the weights
    assert asked["gpt2/base/xl/result.json"]["gpu"] == "0"
    assert "gpu" not in asked["data/corpus/train.jsonl"]


def test_on_a_cpu_no_gpu_is_asked_for(copy):
    config = write_config(copy, "cpu.yaml", hardware__device="cpu")
    asked = resources_of(snakemake(copy, "-n", "tables", "--configfile", config))
    assert {found["gpu"] for found in asked.values() if "gpu" in found} == {"0"}
    assert asked["results/test/pretrain/all_aux/d16/seed1/metrics.jsonl"]["gpu"] == "0"


def test_the_kernel_of_linear_maps_is_chosen_once_where_the_run_asks_for_it(copy):
    for name, linear, device, jobs in (("a", "auto", "cpu", 1), ("b", "auto", "cuda", 0), ("c", "onednn", "cpu", 0)):
        config = write_config(copy, f"{name}.yaml", hardware__linear=linear, hardware__device=device)
        plan = snakemake(copy, "-n", "-p", "tables", "--configfile", config)
        assert planned(plan).get("kernels", 0) == jobs
        trainings = re.findall(r"exec tapernorm (?:pretrain|finetune) .*", plan.stdout)
        assert trainings
        assert all(("--kernels results/test/kernels.json" in command) == bool(jobs) for command in trainings)


def test_a_limit_below_what_one_job_needs_is_refused_rather_than_cut(copy):
    config = write_config(copy, "two.yaml", hardware__device="cuda", hardware__devices_per_job=2)
    call = ("-n", "tables", "--workflow-profile", "profiles/gpu", "--configfile", config)
    refused = snakemake(copy, *call)
    assert refused.returncode != 0
    assert "devices_per_job is 2 and this call's limit of the resource gpu is 1" in refused.stdout
    assert planned(snakemake(copy, *call, "--resources", "gpu=2"))["pretrain"] > 0


@pytest.mark.parametrize("name", ["gpu", "slurm"])
def test_long_runs_start_again_for_data_and_settings_alone(name):
    settings = yaml.safe_load((ROOT / "profiles" / name / "profile.yaml").read_text())
    assert settings["rerun-triggers"] == ["mtime", "params", "input"]
    assert (settings["retries"], settings["rerun-incomplete"]) == (3, True)


def test_an_edited_command_starts_nothing_anew(tmp_path):
    """Its control: where commands count, the same edit starts the corpus anew."""
    folder = project(tmp_path)
    assert snakemake(folder, CORPUS, *TEST).returncode == 0
    rules = folder / "workflow/rules/data.smk"
    rules.write_text(rules.read_text().replace('"tapernorm corpus --job', '"tapernorm  corpus --job'))
    for name in ("default", "gpu"):
        assert (
            "Nothing to be done"
            in snakemake(folder, "-n", CORPUS, "--workflow-profile", f"profiles/{name}", *TEST).stdout
        )
    assert planned(snakemake(folder, "-n", CORPUS, "--rerun-triggers", "code", *TEST)) == {"corpus": 1}


def test_the_workflow_passes_snakemakes_linter():
    done = snakemake(ROOT, "--lint")
    assert done.returncode == 0, done.stdout
    assert "your workflow is in a good condition" in done.stdout


def test_every_rule_with_a_command_names_the_one_environment():
    for path in (ROOT / "workflow/rules").glob("*.smk"):
        named = re.findall(r'conda:\n\s+"(.*)"', path.read_text())
        assert named == ["../../environment.yml"] * len(re.findall(r"^ +shell:$", path.read_text(), flags=re.MULTILINE))
    assert (ROOT / "workflow/rules/../../environment.yml").is_file()


def test_parsing_the_workflow_imports_no_torch():
    """SLURM parses it once more for every job."""
    code = (
        "import atexit, sys\n"
        "from snakemake.cli import main\n"
        "atexit.register(lambda: print('TORCH', 'torch' in sys.modules, 'tapernorm_lab.config.run' in sys.modules))\n"
        "main(['-n', 'table4', '--configfile', 'config/paper.yaml', '--nolock', '--cores', '1', '--quiet'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "TORCH False True" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "target",
    [
        "results/paper/pretrain/all_auxx/d64/seed1/result.json",
        "results/paper/pretrain/all_aux/dx64/seed1/result.json",
        "results/paper/finetune/fake/small/seed1/result.json",
    ],
)
def test_a_wildcard_takes_known_values_alone(target):
    done = snakemake(ROOT, "-n", target, *PAPER)
    assert done.returncode != 0
    assert "No rule to produce" in done.stdout


def test_a_config_path_with_spaces_and_quotes_works(copy):
    config = write_config(copy, "it's a lab's \"own\".yaml", run="odd")
    done = snakemake(copy, "results/odd/data/corpus/manifest.json", "--configfile", config)
    assert done.returncode == 0, done.stdout
    assert (copy / "results/odd/data/corpus/manifest.json").is_file()


def test_a_clone_comes_with_published_runs_and_computes_its_own_all_the_same(tmp_path):
    folder = project(tmp_path)
    for root in ("results", "figures"):
        shutil.copytree(ROOT / root / "published", folder / root / "published")
    plan = planned(snakemake(folder, "-n", "figure1b", "figure2"))
    assert (plan["pretrain"], plan["figure"]) == (len(load_config(ROOT / "config/demo.yaml").pretrain_cells()), 2)
    assert plan["pretrain"] > 20


def test_held_out_rows_can_be_filtered_too(copy):
    corpora = yaml.safe_load((copy / "config/test.yaml").read_text())["gpt2"]["corpora"]
    corpora[2]["of"] = "web"
    done = snakemake(copy, "-n", "-p", "table3", "--configfile", write_config(copy, "rows.yaml", gpt2__corpora=corpora))
    assert planned(done)["filter"] == 1
    assert "--rows results/test/gpt2/blocks/train --seen results/test/gpt2/blocks/base" in done.stdout


def own_text(*files, **changes):
    data = {"source": "text", "files": list(files), "field": "text", "part": None}
    return {**data, "valid_fraction": 0.2, "max_train_documents": None, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"taper__anchor_wieght": 0.1},
            "taper.anchor_wieght: unknown key; valid keys here are anchor_weight, ema_horizon, ema_rate",
        ),
        ({"train__lr": ABSENT}, "train.lr: missing"),  # and not the demo's
        ({"data": own_text("no{wildcard}.txt")}, "no{wildcard}.txt has a brace in its name"),
        ({"gpt2__text": [own_text("absent.txt")]}, "data.files: 'absent.txt' matches no file"),
    ],
)
def test_a_config_that_cannot_be_is_one_clear_error(copy, changes, said):
    (copy / "no{wildcard}.txt").write_text("A text.")
    done = snakemake(copy, "-n", "table1", "--configfile", write_config(copy, "bad.yaml", **changes))
    assert done.returncode != 0
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert not (copy / "results/test").exists()


def test_a_folder_of_parquet_files_stands_in_for_openwebtext(copy):
    (copy / "shards").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), copy / "shards/a.parquet")
    text = own_text("shards", source="openwebtext", field=None, valid_fraction=None)
    done = snakemake(copy, "-n", "table3", "--configfile", write_config(copy, "owt.yaml", gpt2__text=[text]))
    assert planned(done)["corpus"] == 3


def test_an_edited_text_file_makes_the_corpus_anew(tmp_path):
    folder = project(tmp_path)
    text = folder / "mine.txt"
    text.write_text("<|endoftext|>".join(f"Document {i} says {i * i}." for i in range(200)))
    call = (CORPUS, "--configfile", write_config(folder, "mine.yaml", data=own_text("mi*.txt")))
    assert snakemake(folder, *call).returncode == 0
    assert "Nothing to be done" in snakemake(folder, *call).stdout
    time.sleep(1.1)  # Snakemake compares whole seconds on some file systems
    text.write_text(text.read_text() + "<|endoftext|>One more.")
    assert planned(snakemake(folder, "-n", *call)) == {"corpus": 1}
    (folder / "mine2.txt").write_text("A new file that the pattern matches.")
    assert planned(snakemake(folder, "-n", *call)) == {"corpus": 1}
