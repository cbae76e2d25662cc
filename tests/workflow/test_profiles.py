"""The profiles: what they plan for the paper's run, counted from its config, and what a scheduler is asked for."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from places import ROOT
from snakemake_runs import SNAKEMAKE, planned, project, snakemake, write_config

from tapernorm.util.errors import UserError
from tapernorm_lab.config.job_cost import Load, limit_min, memory_mb
from tapernorm_lab.config.load import load_config

PROFILES = ("default", "gpu", "slurm")
PAPER = ("--configfile", "config/paper.yaml", "--nolock")


def dry_run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SNAKEMAKE, "-n", *arguments], cwd=folder, capture_output=True, text=True, timeout=300)


def profile(name: str) -> dict[str, object]:
    return yaml.safe_load((ROOT / "profiles" / name / "profile.yaml").read_text())


def expected_counts() -> dict[str, int]:
    """Jobs per rule that the paper's config implies, where a config alone decides."""
    config = load_config(ROOT / "config/paper.yaml")
    assert config.gpt2 is not None
    trained, tuned = config.pretrain_cells(), config.finetune_cells()
    sizes = len(config.gpt2.sizes)
    return {
        "pretrain": sum(len(width.variants) for width in config.widths) * len(config.seeds),
        "fold": sum(variant.tapers for variant, *_ in trained),
        "base": sizes,
        "finetune": len(config.gpt2.methods) * sizes * len(config.gpt2.seeds),
        "finetune_fold": sum(method != "vanilla" for method, *_ in tuned),
        "evaluate": len(tuned),
        "evaluate_base": sizes + sum(len(size.published) for size in config.gpt2.sizes),
        "bench": 2,
        "corpus": 2,
        "tokenizer": 2,
        "tokens": 2,
    }


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_plans_the_papers_run(name):
    gpus = ("--resources", "gpu=16") if name == "gpu" else ()  # its own one is less than the largest job takes
    counts = planned(dry_run("tables", "figures", "--workflow-profile", f"profiles/{name}", *gpus, *PAPER))
    expected = expected_counts()
    assert {rule: counts.get(rule) for rule in expected} == expected
    assert expected["pretrain"] == 84


def asked(job_text: str) -> dict[str, str]:
    """The resources line of a job in a dry-run."""
    (line,) = re.findall(r"^    resources: (.*)$", job_text, flags=re.MULTILINE)
    return dict(re.findall(r"(\w+)=([^,{]+)", line))


def job_of(said: str, target: str) -> str:
    """What a dry-run says of the job that makes `target`."""
    jobs = re.split(r"^\[.*\]$", said, flags=re.MULTILINE)
    (text,) = [job for job in jobs if re.search(rf"^    output: .*{re.escape(target)}\b", job, flags=re.MULTILINE)]
    return text


def test_a_slurm_job_asks_for_a_gpu_and_for_what_its_model_and_steps_need():
    config = load_config(ROOT / "config/paper.yaml")
    done = dry_run("tables", "--workflow-profile", "profiles/slurm", *PAPER)
    assert done.returncode == 0, done.stderr
    limits = []
    for width in config.widths:
        target = f"results/paper/pretrain/all_aux/d{width.d_model}/seed3/result.json"
        resources = asked(job_of(done.stdout + done.stderr, target))
        load = Load.of_pretraining(config.pretrain_job("all_aux", width.d_model, 3), config.hardware)
        assert resources["gpu"] == "1"
        assert resources["runtime"] == str(limit_min(load, config.hardware))
        assert resources["mem_mb"] == str(memory_mb(load, config.hardware))
        assert resources["slurm_extra"] == "--signal=TERM@120"
        limits.append(int(resources["runtime"]))
    assert limits == sorted(limits)
    resources = asked(job_of(done.stdout + done.stderr, "results/paper/finetune/all_aux/xl/seed1/result.json"))
    assert (resources["gpu"], resources["nodes"]) == ("4", "1")  # of one machine
    hardware = config.finetune_hardware("xl")
    load = Load.of_finetune(config.finetune_job("all_aux", "xl", 1), config.base_job("xl"), None, hardware)
    assert resources["mem_mb"] == str(memory_mb(load, hardware))
    assert resources["runtime"] == str(limit_min(load, hardware))
    assert int(resources["mem_mb"]) > 60_000  # each of four processes reads the weights
    assert asked(job_of(done.stdout + done.stderr, "results/paper/gpt2/base/xl/result.json"))["gpu"] == "0"
    assert "gpu" not in asked(job_of(done.stdout + done.stderr, "results/paper/data/corpus/train.jsonl"))


def test_on_a_cpu_no_gpu_is_asked_for(tmp_path):
    folder = project(tmp_path)
    config = write_config(folder, "cpu.yaml", hardware__device="cpu")
    done = dry_run("tables", "--workflow-profile", "profiles/slurm", "--configfile", config, folder=folder)
    assert asked(job_of(done.stdout, "results/test/pretrain/all_aux/d16/seed1/metrics.jsonl"))["gpu"] == "0"


def test_a_limit_below_what_one_job_needs_is_refused_rather_than_cut(tmp_path):
    folder = project(tmp_path)
    config = write_config(folder, "two.yaml", hardware__device="cuda", hardware__devices_per_job=2)
    arguments = ("tables", "--workflow-profile", "profiles/gpu", "--configfile", config)
    refused = dry_run(*arguments, folder=folder)
    assert refused.returncode != 0
    assert "devices_per_job is 2 and this call's limit of the resource gpu is 1" in refused.stdout + refused.stderr
    enough = dry_run(*arguments, "--resources", "gpu=2", folder=folder)
    assert enough.returncode == 0, enough.stdout + enough.stderr


@pytest.mark.parametrize("name", ["gpu", "slurm"])
def test_long_runs_start_again_for_data_and_settings_alone(name):
    settings = profile(name)
    assert settings["rerun-triggers"] == ["mtime", "params", "input"]
    assert settings["retries"] == 3
    assert settings["rerun-incomplete"] is True


@pytest.mark.parametrize("name", ["default", "gpu"])
def test_an_edited_command_starts_nothing_anew(tmp_path, name):
    """Its control: where commands count, the same edit starts the corpus anew."""
    folder = project(tmp_path)
    config = ("--configfile", "config/test.yaml")
    corpus = "results/test/data/corpus/manifest.json"
    assert snakemake(folder, corpus, *config).returncode == 0
    rules = folder / "workflow/rules/data.smk"
    rules.write_text(rules.read_text().replace('"tapernorm corpus --job', '"tapernorm  corpus --job'))
    profiled = dry_run(corpus, "--cores", "1", "--workflow-profile", f"profiles/{name}", *config, folder=folder)
    assert "Nothing to be done" in profiled.stdout + profiled.stderr
    counted = ("--cores", "1", "--rerun-triggers", "code")
    assert planned(dry_run(corpus, *counted, *config, folder=folder)) == {"corpus": 1}


def test_the_workflow_passes_snakemakes_linter():
    done = subprocess.run([SNAKEMAKE, "--lint"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Congratulations, your workflow is in a good condition" in done.stdout + done.stderr


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
        "main(['-n', 'tables', '--configfile', 'config/paper.yaml', '--nolock', '--cores', '1', '--quiet'])\n"
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
    done = dry_run(target, *PAPER)
    assert done.returncode != 0
    assert "No rule to produce" in done.stdout + done.stderr


def test_a_config_path_with_spaces_and_quotes_works(tmp_path):
    folder = project(tmp_path)
    config = write_config(folder, "it's a lab's \"own\".yaml", run="odd")
    done = snakemake(folder, "results/odd/data/corpus/manifest.json", "--configfile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "results/odd/data/corpus/manifest.json").is_file()


@pytest.mark.parametrize("name", ["two words", "it's", "a/b", "../up", "$HOME", "-n"])
def test_a_run_name_that_a_shell_or_path_would_misread_is_refused(name):
    with pytest.raises(UserError, match="run: String should match pattern"):
        load_config(ROOT / "config/test.yaml", [f"run={json.dumps(name)}"])
