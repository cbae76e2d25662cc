"""The command line: instant help, one job however it is named, one clear line per error, nothing half-written."""

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import writing
from places import ROOT
from training import HARDWARE, VOCABULARY, command, make_job, outcome_of, write_stream

import tapernorm
import tapernorm_lab.experiments.machine
import tapernorm_lab.experiments.pretrain
from tapernorm.util.hashing import canonical_json
from tapernorm_lab.cli.arguments import options
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.jobs import BenchJob
from tapernorm_lab.config.load import load_config
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.training.stop_signals import Stopped

CONFIG = str(ROOT / "config" / "test.yaml")
VERBS = {"corpus", "tokenizer", "tokens", "pretrain", "finetune", "fold", "evaluate", "bench", "generate"}
VERBS |= {"taper", "export", "rows", "table", "figure", "plan", "compare"}

HELP = """
import contextlib, io, sys
from tapernorm_lab.cli.main import main
for verb in sys.argv[1:]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    assert f"tapernorm {verb}" in text.getvalue(), text.getvalue()
heavy = sorted({"torch", "numpy", "pandas", "sentencepiece", "datasets", "matplotlib", "yaml"} & set(sys.modules))
print(heavy)
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


def complaint(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """What `tapernorm ARGUMENTS` says when it refuses, without its name."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tapernorm: ")
    assert "Traceback" not in captured.err
    return captured.err.removeprefix("tapernorm: ")


# --- help ---


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *VERBS], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_lists_every_verb(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out.partition("text and tokens:")[2], flags=re.MULTILINE)
    assert len(listed) == len(VERBS) == 16
    assert set(listed) == VERBS


def test_version(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == tapernorm.__version__ + "\n"


@pytest.mark.parametrize("arguments", [[], ["no-such-verb"], ["pretrain"], ["table"]])
def test_what_cannot_be_parsed_shows_the_usage(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: tapernorm" in capsys.readouterr().err


def test_options_are_described_as_they_are_typed() -> None:
    table = dict.fromkeys(("NAME?", "--out DIR!", "--kind a|b:b", "--n N:3", "--more X=Y*", "--x X"), "")
    table["--all"] = "100 %"
    parser = argparse.ArgumentParser()
    options(parser, table)
    bare = {"name": None, "all": False, "kind": "b", "n": 3, "more": None, "x": None}
    assert vars(parser.parse_args(["--out", "o"])) == {**bare, "out": Path("o")}
    words = ["x", "--out", "o", "--all", "--kind", "a", "--n", "5", "--more", "p=q", "r=s", "--x", "1e-3"]
    given = {"name": "x", "out": Path("o"), "all": True, "kind": "a", "n": 5, "more": ["p=q", "r=s"], "x": 1e-3}
    assert vars(parser.parse_args(words)) == given
    assert "100 %" in parser.format_help()
    for wrong in (["--all"], ["--out", " "], ["--out", "o", "--n", "0"], ["--out", "o", "--kind", "c"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


# --- jobs ---


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `pretrain`, which does nothing."""
    calls: list[tuple[Any, ...]] = []

    def pretrain(*arguments: Any, overwrite: bool) -> dict[str, Any]:
        calls.append(arguments)
        return {"values": {"valid_ce": {"value": 1.0}, "bits_per_byte": {"value": 1.0}}}

    monkeypatch.setattr(tapernorm_lab.experiments.pretrain, "pretrain", pretrain)
    return calls


@pytest.mark.parametrize("variant", ["baseline", "internal", "all_aux"])
def test_a_job_and_a_config_name_the_same_job(called: list, variant: str) -> None:
    folders = ["--tokens", "tokens", "--out", "out"]
    settings = ["--set", "train.lr=0.01", "--set", "seeds=[5]"]
    cell = ["--variant", variant, "--width", "24", "--seed", "5"]
    assert main(["pretrain", "--config", CONFIG, *settings, *cell, *folders]) == 0
    config = load_config(CONFIG, ["train.lr=0.01", "seeds=[5]"])
    job = config.pretrain_job(variant, 24, 5)
    given = ["--job", canonical_json(job), "--hardware", canonical_json(config.hardware)]
    assert main(["pretrain", *given, *folders]) == 0
    assert called == [(job, Path("tokens"), Path("out"), config.hardware)] * 2
    assert job.train.lr == 0.01
    assert (job.taper is None) == (variant == "baseline")


@pytest.mark.parametrize(
    ("verb", "needs", "option"),
    [
        ("corpus", [], ["--text", "base"]),
        ("tokenizer", ["--corpus", "c"], ["--gpt2"]),
        ("tokens", ["--corpus", "c", "--tokenizer", "t"], ["--text", "base"]),
        ("pretrain", ["--tokens", "t"], ["--stage", "S1"]),
        ("pretrain", ["--blocks", "b"], ["--size", "tiny"]),
    ],
)
def test_a_job_takes_no_option_that_would_choose_one(verb: str, needs: list, option: list, tmp_path, capsys) -> None:
    said = complaint(capsys, [verb, *needs, "--job", "{}", *option, "--out", str(tmp_path / "out")])
    assert f"takes no {option[0]}" in said
    assert not (tmp_path / "out").exists()


def test_threads_replace_those_of_the_config(called: list) -> None:
    cell = ["--variant", "baseline", "--width", "24", "--seed", "1", "--tokens", "t", "--out", "o"]
    assert main(["pretrain", "--config", CONFIG, *cell, "--threads", "7"]) == 0
    assert called[0][3] == load_config(CONFIG).hardware.model_copy(update={"threads": 7})


def test_a_run_from_the_command_line_scores_and_can_be_evaluated(tokens: Path, tmp_path: Path, capsys) -> None:
    assert main(command(make_job(), tokens, tmp_path / "run")) == 0
    score = json.loads((tmp_path / "run" / "result.json").read_text())["values"]["valid_ce"]["value"]
    assert f"valid_ce {score:.4f} nats/token" in capsys.readouterr().out
    outcome_of(tmp_path / "run")
    file = tmp_path / "scores" / "valid.json"
    assert main(["evaluate", "--model", str(tmp_path / "run"), "--tokens", str(tokens), "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found["ce_nats_per_token"] == pytest.approx(score, rel=1e-6)  # in other batches
    assert found["tokens"] == 100


def test_a_verb_tells_in_one_line_what_it_wrote_and_how_long_it_took(tmp_path: Path, capsys) -> None:
    published = ["--results", str(ROOT / "results/published/demo"), "--out", str(tmp_path)]
    assert main(["table", "table4", "--config", str(ROOT / "config/demo.yaml"), *published]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    files = f"{tmp_path}: table4.csv, table4.md, table4.tex, table4.html"
    waits = ", ".join(rf"\d+\.\d s for {what}" for what in ("a core", "a lock", "a GPU slot"))
    took = rf"\(ran \d+\.\d s, of which it waited {waits}\)"
    assert re.fullmatch(rf"tapernorm table: output in {re.escape(files)} {took}", line)
    assert main(["plan", "--config", CONFIG]) == 0
    assert capsys.readouterr().err == ""  # it writes nothing


def test_a_stage_that_the_study_lacks_is_one_line_with_those_it_has() -> None:
    bin_ = Path(sys.executable).parent
    words = ["make", f"VENV={bin_.parent}", "-o", f"{bin_.parent}/.ready"]  # which is not to be made
    done = subprocess.run([*words, "study", "STAGE=S9"], cwd=ROOT, capture_output=True, text=True, check=False)
    said, *_ = done.stderr.splitlines()
    assert done.returncode == 2
    assert "'S9'" in said
    assert {"S0", "S1", "S2", "S3", "S4"} <= set(said.split())


# --- errors ---


JOB, HARD = canonical_json(make_job()), canonical_json(HARDWARE)
CELL = ["--variant", "all", "--width", "24", "--seed", "1"]
REFUSED = {
    "no such config": (["--config", "absent.yaml", *CELL], "no config file 'absent.yaml'"),
    "a folder as config": (["--config", ".", *CELL], "Is a directory"),
    "a config without its cell": (["--config", CONFIG, "--variant", "all"], "needs --width, --seed"),
    "a width that is not there": (["--config", CONFIG, *CELL[:2], "--width", "7", *CELL[4:]], "no width 7"),
    "an unknown setting": (["--config", CONFIG, *CELL, "--set", "train.rate=1"], "no setting 'train.rate'"),
    "an impossible setting": (["--config", CONFIG, *CELL, "--set", "train.lr=-1"], "train.lr: Input should be greater"),
    "a setting without a value": (["--config", CONFIG, *CELL, "--set", "train.lr"], "write it as key.path=value"),
    "a value that is not YAML": (["--config", CONFIG, *CELL, "--set", "train.lr=[1"], "train.lr=[1"),
    "a job that is not JSON": (["--job", "{", "--hardware", HARD], "--job is not JSON"),
    "a job of another kind": (["--job", "[]", "--hardware", HARD], "--job is not a valid PretrainJob"),
    "a job with more keys": (["--job", JOB[:-1] + ',"x":1}', "--hardware", HARD], "x: unknown key; valid keys here"),
    "a job without hardware": (["--job", JOB], "needs --hardware"),
    "hardware that is not JSON": (["--job", JOB, "--hardware", "cpu"], "--hardware is not JSON"),
    "a job and a setting": (["--job", JOB, "--hardware", HARD, "--set", "train.lr=1"], "--set changes a --config"),
    "a job and a cell": (["--job", JOB, "--hardware", HARD, "--seed", "0"], "takes no --seed"),
}


REFUSED |= {
    "a variant that the width lacks": (
        ["--config", CONFIG, "--variant", "all", "--width", "16", "--seed", "1"],
        "--variant all is not among those of width 16: baseline, internal_aux, all_aux",
    ),
    "a seed that is not the config's": (
        ["--config", CONFIG, *CELL[:4], "--seed", "7"],
        "--set 'seeds=[7]'",
    ),
    "a config that is a list": (["--config", str(Path(__file__)), *CELL], "is not YAML: line "),
    "a job of too many digits": (["--job", '{"seed": ' + "1" * 5000 + "}", "--hardware", HARD], "too many digits"),
    "a job of too many brackets": (["--job", "[" * 10**5, "--hardware", HARD], "nested too deeply"),
    "a truth value as seed": (
        ["--job", JOB.replace('"seed":3', '"seed":true'), "--hardware", HARD],
        "seed: True is not a number",
    ),
    "a job without all betas": (
        ["--config", CONFIG, *CELL, "--set", "train.betas=[0.9]"],
        "too few values (got [0.9])",
    ),
    "an argument that is no text": (["--config", "caf\udce9.yaml", *CELL], "is not UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_work(tokens: Path, tmp_path: Path, capsys, case: str) -> None:
    arguments, said = REFUSED[case]
    out = tmp_path / "out"
    assert said in complaint(capsys, ["pretrain", *arguments, "--tokens", str(tokens), "--out", str(out)])
    assert not out.exists()


ROBUSTNESS = ["evaluate", "--models", "baseline=m", "--tokens", "t", "--tokenizer", "t"]
FINETUNE = ["finetune", "--base", "b", "--blocks", "b"]
ARM = ["pretrain", "--tokens", "t", "--stage"]
OTHER_CELLS = {
    "no GPT-2 size 'huge'": [*FINETUNE, "--method", "vanilla", "--size", "huge", "--seed", "1"],
    "--method fakeln is not among": [
        *(*FINETUNE, "--set", "gpt2.methods=[vanilla]"),
        *("--method", "fakeln", "--size", "tiny", "--seed", "1"),
    ],
    "--seed 9 is not among those of the GPT-2": [*FINETUNE, "--method", "vanilla", "--size", "tiny", "--seed", "9"],
    "no stage 'S9'": [*ARM, "S9", "--arm", "baseline", "--seed", "1"],
    "no arm 'none'": [*ARM, "S1", "--arm", "none", "--seed", "1"],
    "--seed 77 is not among those of stage S1": [*ARM, "S1", "--arm", "baseline", "--seed", "77"],
    "no width 17": [*ROBUSTNESS, "--width", "17", "--seed", "1"],
    "--seed 78 is not among": [*ROBUSTNESS, "--width", "24", "--seed", "78"],
    "--seed 79 is not among those of stage S1": [*ROBUSTNESS, "--stage", "S1", "--seed", "79"],
    "no GPT-2 size 'vast'": ["pretrain", "--size", "vast"],
}


@pytest.mark.parametrize("said", OTHER_CELLS)
def test_other_cells_that_a_config_lacks_are_refused(said: str, tmp_path: Path, capsys) -> None:
    told = complaint(capsys, [*OTHER_CELLS[said], "--config", CONFIG, "--out", str(tmp_path / "out")])
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


PRETRAIN = ["pretrain", "--job", JOB, "--hardware", HARD, "--tokens", "t", "--out", "o"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(([*PRETRAIN, "--threads", threads], "--threads") for threads in ("0", "-1", "two", "100000")),
        (["pretrain", "--seed", "1" * 23], "--seed: 1111"),
        (["pretrain", "--seed", "-1"], "--seed: -1 "),
        (["pretrain", "--width", "0"], "--width: 0 "),
        (["plan", "--flops-per-s", "nan"], "--flops-per-s: nan "),
        (["plan", "--flops-per-s", "0"], "--flops-per-s: 0 "),
        (["rows", "--run", "../up"], "--run: '../up' "),
        (["compare", "--run", ""], "--run: '' "),
        (["compare", "--run", "a" * 300], "--run: 'aaa"),
        (["figure", "--published", "../up"], "--published: '../up' "),
        (["generate", "--seed", "1" * 5000], "--seed"),
    ],
)
def test_an_option_out_of_range_is_one_line(words: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert said in told
    assert told.startswith(f"tapernorm {words[0]}: --")
    assert told.count("\n") == 1


def test_threads_of_a_config_that_no_machine_can_start_are_refused(tokens: Path, tmp_path: Path, capsys) -> None:
    hardware = HARDWARE.model_copy(update={"threads": 100_000})
    said = complaint(capsys, command(make_job(), tokens, tmp_path / "out", hardware))
    assert "hardware.threads 100000 exceeds" in said
    assert said.count("\n") == 1


ODD = [*ROBUSTNESS[:1], *ROBUSTNESS[3:], "--config", CONFIG, "--width", "24", "--seed", "1", "--out", "o", "--models"]
NAMING = {
    "rows": ["rows", "--run", "r", "--out", "t", "tapers"],
    "evaluate": ["evaluate", "--model", "m", "--tokenizer", "t", "--out", "o", "--blocks"],
    "evaluate --models": ODD,
    "taper": ["taper", "--model", "m", "--data", "web", "--steps", "10", "--out", "o", "--score"],
}


@pytest.mark.parametrize("name", ["x/../../evil", "..", "", "a b", "a" * 65, "a.b", "a/b"])
@pytest.mark.parametrize("verb", NAMING)
def test_a_name_that_could_lead_elsewhere_is_refused(verb: str, name: str, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(capsys, [*NAMING[verb], f"{name}=web"])
    assert NAMING[verb][-1].replace("tapers", "RESULT") in said
    assert "NAME=" in said or "64 bytes" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_run_folder_should_be(tokens: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out").write_text("mine")
    said = complaint(capsys, command(make_job(), tokens, tmp_path / "out"))
    assert "out is a file" in said
    assert (tmp_path / "out").read_text() == "mine"
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("verb", ["corpus", "tokenizer", "tokens", "pretrain", "bench", "table", "figure"])
def test_every_configured_verb_explains_a_bad_config(tmp_path: Path, capsys, verb: str) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text(Path(CONFIG).read_text().replace("seeds: [1, 2]", "seeds: [1, 1]").replace("run: test", ""))
    needs = {
        "corpus": [],
        "tokenizer": ["--corpus", "c"],
        "tokens": ["--corpus", "c", "--tokenizer", "t"],
        "pretrain": ["--tokens", "t", *CELL],
        "bench": ["decode", "--model", "m"],
        "table": ["table1", "--results", "r"],
        "figure": ["figure2", "--results", "r"],
    }[verb]
    said = complaint(capsys, [verb, *needs, "--config", str(config), "--out", str(tmp_path / "out")])
    assert "run: missing" in said
    assert "seeds" in said
    assert not (tmp_path / "out").exists()


def test_a_model_is_not_scored_on_tokens_of_another_vocabulary(tokens: Path, tmp_path: Path, capsys) -> None:
    assert main(command(make_job(), tokens, tmp_path / "run")) == 0
    other = write_stream(tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": VOCABULARY + 1}))
    capsys.readouterr()
    arguments = ["evaluate", "--model", str(tmp_path / "run"), "--tokens", str(other)]
    assert f"vocabulary of {VOCABULARY + 1}, but the model one of {VOCABULARY}" in complaint(capsys, arguments)


def raising(error: BaseException):
    def pretrain(*_: Any, **__: Any) -> None:
        raise error

    return pretrain


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(tapernorm_lab.experiments.pretrain, "pretrain", raising(Stopped(signal.SIGINT)))
    assert main(command(make_job(), Path("t"), Path("o"))) == 130
    said = "training resumes from its last checkpoint\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_full_disk_anywhere_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
    monkeypatch.setattr(tapernorm_lab.experiments.pretrain, "pretrain", raising(full))
    said = complaint(capsys, command(make_job(), Path("t"), Path("o")))
    assert "No space left on device: 'somewhere'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), RuntimeError("a bug"), ValueError("a bug")])
def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(tapernorm_lab.experiments.pretrain, "pretrain", raising(error))
    with pytest.raises(type(error), match=r"broken disk|a bug"):
        main(command(make_job(), Path("t"), Path("o")))


# --- what belongs together ---


RUN = ["--config", CONFIG, "--out", "o"]
BLOCKS = ["evaluate", "--model", "m", "--blocks", "a=b"]
TOGETHER = [
    (["tokens", *RUN, "--text", "train", "--corpus", "c"], "needs --tokenizer:"),
    (["tokens", *RUN, "--text", "stdlib_filtered"], "needs --rows, --seen:"),
    (
        [*("tokens", *RUN, "--text", "stdlib_filtered", "--rows", "r", "--seen", "s", "--corpus", "c")],
        "takes no --corpus:",
    ),
    (["tokens", *RUN, "--corpus", "c", "--tokenizer", "t", "--seen", "s"], "takes no --seen:"),
    (["tokenizer", *RUN, "--gpt2"], "needs --corpus:"),
    (
        [*("tokenizer", "--config", str(ROOT / "config/paper.yaml"), "--gpt2", "--corpus", "c", "--out", "o")],
        "takes no --corpus:",
    ),
    (["pretrain", *RUN, "--size", "tiny", "--variant", "all"], "--size takes no --variant:"),
    (["pretrain", *RUN, *CELL, "--stage", "S1"], "--stage takes no --variant, --width:"),
    (["pretrain", *RUN, "--size", "tiny", "--blocks", "b", "--tokens", "t"], "takes no --tokens:"),
    (["pretrain", *RUN, *CELL, "--tokens", "t", "--blocks", "b"], "takes no --blocks:"),
    (["evaluate", "--model", "m"], "--model needs --tokens or --blocks"),
    (["evaluate", "--model", "m", "--tokens", "t", "--blocks", "a=b"], "--tokens takes no --blocks:"),
    (["evaluate", "--model", "m", "--tokens", "t", "--seed", "0"], "--tokens takes no --seed:"),
    ([*BLOCKS], "--blocks needs --tokenizer, --out:"),
    ([*BLOCKS, "--tokenizer", "t", "--out", "o", "--split", "train"], "--blocks takes no --split:"),
    (["evaluate", "--models", "baseline=m", "--tokens", "t", *RUN], "--models needs --tokenizer:"),
    (["table", "table9", *RUN], "table1, table2"),
    (["figure", "table1", *RUN], "figure1a, figure1b"),
    (["table", "table1", "--out", "o"], "--config"),
    (["figure", "figure2", "--config", CONFIG], "needs --out:"),
    (["figure", "figure2", "--published", "demo"], "--published takes no NAME:"),
    (["figure", "figure2", *RUN, "--figures", "f"], "takes no --figures:"),
    (["rows", "table1", "--out", "o"], "training, gpt2"),
    (["rows", "training", "--run", "r", "--out", "o"], "rows training needs RESULT:"),
    (["rows", "training", "f", "--run", "r", "--tokens", "t", "--out", "o"], "rows training takes no --tokens:"),
    (["rows", "study_S1", *RUN], "rows study_S1 needs --results:"),
    (["compare", "--run", "demo", "--any-code"], "takes no --any-code:"),
]


@pytest.mark.parametrize(("words", "said"), TOGETHER)
def test_options_that_do_not_belong_together_are_refused(
    words: list[str], said: str, monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    told = complaint(capsys, words)
    assert said in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- generate ---


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in a run folder that writes ` 😀 ran` after `dog`, and then ends the document."""
    run = tmp_path_factory.mktemp("results") / "tiny"
    coder = writing.make_tokenizer(run)
    chain = [*coder.encode("dog"), *coder.encode("😀ran"), coder.eod]
    return writing.make_writer(run / "pretrain" / "all" / "d48" / "seed0", chain)


GENERATE = ["generate", "--device", "cpu", "--checkpoint"]


def test_generate_streams_a_continuation(writer: Path, capsys) -> None:
    assert main([*GENERATE, str(writer), "--prompt", "dog", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "dog😀ran\n"
    assert main([*GENERATE, str(writer), "--prompt", "dog", "--top-k", "1", "--new-tokens", "4"]) == 0
    assert capsys.readouterr().out == "dog😀\n"


def test_generate_flushes_each_piece_before_the_next_is_computed(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *text, **how: shown.append((*text, how.get("flush"))))
    assert main([*GENERATE, str(writer), "--prompt", "dog", "--temperature", "0"]) == 0
    pieces = [(text, flushed) for text, *flushed in shown[:-1] if text]
    assert pieces[:2] == [("dog", [True]), ("😀", [True])]
    assert len(pieces) > 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "--temperature -1 "),
        (["--top-p", "1.5"], "--top-p 1.5 "),
        (["--new-tokens", "40"], "exceeds the model's context of 40: shorten the prompt, or ask for fewer new tokens"),
        (["--tokenizer", "absent"], "absent"),
    ],
)
def test_generate_refuses_before_it_shows_anything(writer: Path, capsys, options: list[str], said: str) -> None:
    assert said in complaint(capsys, [*GENERATE, str(writer), "--prompt", "dog", *options])


# --- bench ---


@pytest.fixture(scope="module")
def tapered(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "internal"
    assert main(command(make_job("internal_aux"), tokens, run)) == 0
    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tapernorm_lab.experiments.machine._BUFFER_BYTES, "cpu", 1 << 20)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["decode", "last_token"])
def test_a_bench_from_the_command_line_is_what_the_tables_read(tapered: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "bench" / f"{kind}.json"
    arguments = ["bench", kind, "--config", CONFIG, "--model", str(tapered), "--out", str(file), "--device", "cpu"]
    assert main(arguments) == 0
    bench = decode_rows.read(file, kind=f"bench_{kind}")
    rounds = load_config(CONFIG).bench.rounds
    assert {(row["prompt"], row["batch"], row["n"]) for row in bench.rows} == {(16, 1, rounds), (16, 2, rounds)}
    assert bench.facts["variant"] == "internal_aux"
    assert bench.facts["torch"] == torch.__version__
    assert bench.facts["load_before"] >= 0
    assert bench.facts["load_after"] >= 0
    assert set(bench.unavailable) == ({"cudagraph"} if kind == "decode" else set())
    table = {"decode": "table2", "last_token": "table2v1"}[kind]
    made = ["--results", str(tmp_path), "--out", str(tmp_path / "tables")]
    assert main(["table", table, "--config", CONFIG, *made]) == 0
    assert (tmp_path / "tables" / f"{table}.md").is_file()


@pytest.mark.usefixtures("quick")
def test_a_bench_job_and_a_config_name_the_same_job(tapered: Path, tmp_path: Path) -> None:
    config = load_config(CONFIG, ["bench.rounds=2", "bench.batches=[1]"])
    job = BenchJob(run=config.run, bench=config.bench)
    made = []
    for source in (
        ["--job", canonical_json(job)],
        ["--config", CONFIG, "--set", "bench.rounds=2", "--set", "bench.batches=[1]"],
    ):
        out = ["--model", str(tapered), "--out", str(tmp_path / "bench.json"), "--device", "cpu"]
        assert main(["bench", "decode", *source, *out]) == 0
        made.append(json.loads((tmp_path / "bench.json").read_text()))
    assert made[0]["job"] == made[1]["job"]
    assert made[0]["provenance"]["config_hash"] == made[1]["provenance"]["config_hash"]


@pytest.mark.usefixtures("quick")
def test_bench_refuses_what_it_cannot_compare(tokens: Path, tapered: Path, tmp_path: Path, capsys) -> None:
    def said(model: Path) -> str:
        out = tmp_path / "bench.json"
        answer = complaint(
            capsys, ["bench", "decode", "--config", CONFIG, "--model", str(model), "--out", str(out), "--device", "cpu"]
        )
        assert not out.exists()
        return answer

    assert "holds no config.json" in said(tmp_path / "absent")
    assert main(command(make_job("baseline"), tokens, tmp_path / "plain")) == 0
    capsys.readouterr()
    assert "0 tapered norms and norm 'rmsnorm': give a tapered run" in said(tmp_path / "plain")
    folded = ["fold", "--model", str(tapered), "--tokens", str(tokens), "--out", str(tmp_path / "folded")]
    assert main([*folded, "--device", "cpu"]) == 0
    capsys.readouterr()
    assert "result.json" in said(tmp_path / "folded" / "fused")


def test_a_reader_that_has_read_enough_leaves_no_traceback():
    words = [sys.executable, "-c", "from tapernorm_lab.cli.main import main; raise SystemExit(main())", "plan"]
    read, write = os.pipe()
    os.close(read)  # before a word is written
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words += ["--config", str(ROOT / "config/test.yaml")]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, check=False, env=buffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
