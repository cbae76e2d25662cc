"""The whole recipe on a user's model: what it writes, that it goes on, and that its numbers are what they say."""

import json
import math
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import own_models
import pytest
import torch
import torch.nn.functional as F
import transformers
from builders import close, snapshot, tokens
from own_models import SPARE, write_model, write_stories
from taper_runs import run_of
from tiny_models import CASES, tiny
from tokenizers import Tokenizer

import tapernorm
from tapernorm import export
from tapernorm.architectures import logits_of
from tapernorm.checkpoints.model_card import worse_than_guessing
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.checkpoints.self_check import FormFailed, SelfCheck
from tapernorm.checkpoints.store import load
from tapernorm.folding import fold
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.data.blocks import Blocks, batch_of
from tapernorm_lab.own_model import own_text as owntext
from tapernorm_lab.own_model import taper_own_model as recipe
from tapernorm_lab.own_model.dry_run import describe
from tapernorm_lab.own_model.job import TaperJob, job_of
from tapernorm_lab.own_model.options import Request
from tapernorm_lab.own_model.taper_own_model import Outcome
from tapernorm_lab.own_model.train import LAST_GOOD, remedy_of
from tapernorm_lab.training.run_folder import fingerprint_of
from tapernorm_lab.training.stop_signals import Stopped
from tapernorm_lab.training.trainer import Diverged, Trainer

STEPS = 12
ASKED = {"model": "", "data": (), "steps": 300, "out": Path(), "device": "cpu"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "gpt2")
    write_model(folder / "llama", "llama")
    write_stories(folder / "train.txt")
    write_stories(folder / "more.txt", 5, first=1000)
    return folder


def request(home: Path, out: Path, name: str = "gpt2", **changes) -> Request:
    base = {"model": str(home / name), "data": (str(home / "train.txt"),), "steps": STEPS, "out": out}
    sizes = {"batch": 3, "micro_batch": 2, "valid_fraction": 0.2, "threads": 1, "device": "cpu"}
    return Request(**{**base, **sizes, **changes})


def taper_model(asked: Request) -> Outcome:
    return recipe.taper_model(run_of(asked))


def blocks_of(asked: Request) -> Mapping[tuple[str, str], Blocks]:
    return owntext.prepare(run_of(asked))


def words_of(home: Path, out: Path, *more: str) -> list[str]:
    shared = ["--model", str(home / "gpt2"), "--data", str(home / "train.txt"), "--steps", str(STEPS), "--threads", "1"]
    return ["taper", *shared, "--batch", "3", "--valid-fraction", "0.2", "--device", "cpu", "--out", str(out), *more]


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory) -> Path:
    """An All-Taper run of the GPT-2, by the command line."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main(words_of(home, out, "--final", "--score", f"more={home / 'more.txt'}")) == 0
    return out


def cut_at(step: int, asked: Request, monkeypatch) -> None:
    """Run the recipe until it is asked to stop before `step`."""
    stock = Trainer.step

    def cut(trainer, k):
        if k == step:
            raise Stopped(signal.SIGTERM)
        return stock(trainer, k)

    monkeypatch.setattr(Trainer, "step", cut)
    with pytest.raises(Stopped):
        taper_model(asked)


def documents(run: Path, split: str) -> list[str]:
    lines = (run / f"data/held-out/corpus/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


# What it writes


def test_the_export_is_the_folded_run_in_plain_transformers(finished):
    tapered = load(finished)
    folded, _ = fold(tapered)
    exported = transformers.AutoModelForCausalLM.from_pretrained(finished / "export").eval()
    ids = torch.randint(exported.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    assert close(logits_of(exported, ids), logits_of(folded, ids), 1e-5)
    text = transformers.AutoTokenizer.from_pretrained(finished / "export")
    assert text.decode(text("the cat sat")["input_ids"]) == "the cat sat"
    tapernorm.load(finished / "export")


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_trains_on_all_of_the_text(home, finished, tmp_path):
    shutil.copytree(home / "gpt2", tmp_path / "cut")
    backend = Tokenizer.from_file(str(home / "gpt2/tokenizer.json"))
    backend.enable_truncation(max_length=24)
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "cut/tokenizer.json"))
    taper_model(request(home, tmp_path / "run", model=str(tmp_path / "cut"), steps=STEPS))
    found, whole = (
        Blocks.open(run / "data/held-out/blocks", "train").split["sha256"] for run in (tmp_path / "run", finished)
    )
    assert found == whole
    exported = tmp_path / "run/export/tokenizer.json"
    assert exported.read_bytes() == (tmp_path / "cut/tokenizer.json").read_bytes()


def test_the_run_trained_every_norm_away_and_counts_as_a_finished_finetune(finished):
    result = read_json(finished / "result.json")
    assert len(result["norms"]) == 5
    assert all(math.isfinite(norm["c"]) for norm in result["norms"].values())
    assert result["job"]["method"] == "all_aux"
    assert result["base"]["licence"] == "mit"
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["gate"] == 1.0
    assert rows[-1]["gate"] == 0.0
    assert [row["step"] for row in rows] == list(range(STEPS))


@pytest.mark.parametrize("corpus", ["held-out", "more"])
def test_scores_are_the_losses_of_the_base_and_of_the_export(home, finished, corpus):
    blocks = Blocks.open(finished / "data" / corpus / "blocks", "valid")
    ids = blocks.rows.to(torch.int64)
    coder = transformers.AutoTokenizer.from_pretrained(home / "gpt2")
    size = sum(len(coder.decode(row[1:], skip_special_tokens=True).encode()) for row in ids)
    scores = read_json(finished / "scores.json")["corpora"][corpus]
    for form, folder in {"before": home / "gpt2", "after": finished / "export"}.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        ce = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        assert scores[form]["rows"]["mean"] == pytest.approx(ce, rel=1e-5)
        bits = ce * ids[:, 1:].numel() / math.log(2) / size
        assert scores[form]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        card = (finished / "export/README.md").read_text()
        assert f"| {corpus} | {form} | {bits:.4f} | {ce:.4f} |" in card
    assert scores["before"]["rows"]["mean"] != scores["after"]["rows"]["mean"]


def test_scored_text_is_scored_whole_and_never_trained_on(home, finished):
    manifest = read_json(finished / "data/more/corpus/manifest.json")
    assert manifest["splits"]["valid"]["documents"] == 5
    assert manifest["splits"]["train"]["documents"] == 0
    trained, held_out = (documents(finished, split) for split in ("train", "valid"))
    assert sorted(trained + held_out) == sorted(own_models.story(i) for i in range(60))
    assert not set(trained) & set(held_out)


def test_rows_are_what_the_tokenizer_of_the_model_makes_with_an_end_after_each_document(home, finished):
    coder = transformers.AutoTokenizer.from_pretrained(home / "gpt2")
    texts = documents(finished, "train")
    stream = [i for text in texts for i in [*coder(text)["input_ids"], coder.eos_token_id]]
    blocks = Blocks.open(finished / "data/held-out/blocks", "train")
    assert blocks.rows.shape[1] == 16
    assert blocks.rows.flatten().tolist() == stream[: blocks.rows.numel()]
    assert blocks.manifest["vocab_size"] == len(coder) + SPARE


# Going on


def test_the_same_command_again_finds_everything_done(home, finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in (finished / "data").rglob("*.bin")}
    weights = (finished / "model.safetensors").stat().st_mtime_ns
    assert main(words_of(home, finished, "--final", "--score", f"more={home / 'more.txt'}")) == 0
    captured = capsys.readouterr()
    assert "nothing to do" in captured.err
    assert captured.out.count("before") == 2
    assert before == {path: path.stat().st_mtime_ns for path in (finished / "data").rglob("*.bin")}
    assert (finished / "model.safetensors").stat().st_mtime_ns == weights


def test_a_run_that_was_cut_ends_as_one_that_was_not(home, tmp_path, monkeypatch):
    whole = taper_model(request(home, tmp_path / "whole"))
    stock = Trainer.step
    cut_at(10, request(home, tmp_path / "cut"), monkeypatch)
    monkeypatch.setattr(Trainer, "step", stock)
    assert list((tmp_path / "cut/resume").rglob("step-*.pt"))
    scores = taper_model(request(home, tmp_path / "cut"))
    assert scores == whole
    assert snapshot(load(tmp_path / "cut").state_dict()) == snapshot(load(tmp_path / "whole").state_dict())
    other = taper_model(request(home, tmp_path / "other", seed=2))
    assert other != whole


def test_another_text_makes_its_blocks_anew(home, tmp_path):
    write_stories(tmp_path / "own.txt", 30)
    run = run_of(request(home, tmp_path / "run", data=(str(tmp_path / "own.txt"),)))
    first = owntext.prepare(run)["held-out", "train"].split["sha256"]
    assert owntext.prepare(run)["held-out", "train"].split["sha256"] == first
    write_stories(tmp_path / "own.txt", 30, first=500)
    assert owntext.prepare(run)["held-out", "train"].split["sha256"] != first


# Internal tapers, other classes


def test_an_internal_taper_of_a_llama_is_exported_normfree_with_its_final_norm(home, tmp_path):
    taper_model(request(home, tmp_path / "run", "llama"))
    exported = tapernorm.load(tmp_path / "run/export")
    assert type(exported.model.norm).__name__ == "LlamaRMSNorm"
    assert close(logits_of(exported, tokens()), logits_of(load(tmp_path / "run"), tokens()), 1e-5)
    assert "kept (1): `model.norm`" in (tmp_path / "run/export/README.md").read_text()


def test_a_run_is_exported_again_in_another_form(finished, tmp_path, capsys):
    words = ["export", "--model", str(finished), "--form", "normfree", "--out", str(tmp_path / "out")]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    assert main(["export", "--check", str(tmp_path / "out")]) == 0
    assert "self-check passed" in capsys.readouterr().out
    assert "| held-out | before |" in (tmp_path / "out/README.md").read_text()
    (tmp_path / "out/tokenizer.json").write_text("{}")
    assert main(["export", "--check", str(tmp_path / "out")]) == 2
    assert "tokenizer.json has changed" in capsys.readouterr().err


# The dry run


def test_the_dry_run_shows_norms_consumers_and_settings_and_writes_nothing(home, tmp_path, capsys):
    assert main(words_of(home, tmp_path / "run", "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    table = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("transformer")}
    assert table["transformer.h.1.ln_2"][1:3] == ["24", "linear"]
    assert table["transformer.h.1.ln_2"][-1] == "mlp.c_fc"
    assert table["transformer.ln_f"][1:3] == ["24", "kept"]
    assert "; 4 norms " in shown
    assert "export: normfree; no stock form" in shown
    assert main(words_of(home, tmp_path / "run", "--dry-run", "--final")) == 0
    assert "export: stock\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_every_class_can_be_described(name, tmp_path):
    model, text = tmp_path / "model", write_stories(tmp_path / "text.txt", 40)
    write_model(model, name)
    shown = describe(run_of(Request(model=str(model), data=(str(text),), steps=20, out=tmp_path / "run", final=True)))
    norms = 1 if name.startswith("phi") else 2
    assert f"; {2 * norms + 1} norms " in shown
    inside = {"qwen3": 4, "phi with norms of q and k": 4, "stablelm with norms of q and k": 8}
    assert shown.count("kept") == inside.get(name, 0)


# A token whose scale one constant cannot stand for


@pytest.fixture(scope="module")
def first_seen(home, tmp_path_factory) -> dict[int, tuple[int, int]]:
    """Token id -> the first step whose batch holds it, and a position where it stands there."""
    asked = request(home, tmp_path_factory.mktemp("seen") / "run", "llama")
    job, train = run_of(asked).job, blocks_of(asked)["held-out", "train"]
    found: dict[int, tuple[int, int]] = {}
    for step in range(STEPS):
        batch = batch_of(train, seed=job.seed, step=step, batch=job.batch)[:, :-1]
        for token in set(batch.flatten().tolist()) - found.keys():
            found[token] = step, int((batch == token).nonzero()[0, 1])
    return found


def with_outlier(home: Path, folder: Path, token: int) -> Path:
    """The LLaMA with one token so large that what is left of it, once its norms are going, overflows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[token] *= 1e14
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(home / "llama").save_pretrained(folder)
    return folder


def first_at(first_seen: dict[int, tuple[int, int]], steps: range) -> tuple[int, int]:
    return next((token, step) for token, (step, _) in sorted(first_seen.items()) if step in steps)


def test_a_rare_outlier_stops_the_run_at_its_step_and_names_norm_place_and_remedy(home, tmp_path, first_seen):
    token, step = first_at(first_seen, range(3, 8))  # the gate falls from step 1 to 8
    out = tmp_path / "run"
    with pytest.raises(Diverged) as error:
        taper_model(request(home, out, model=str(with_outlier(home, tmp_path / "model", token))))
    message = str(error.value)
    assert f"the cross-entropy is not finite at step {step}; stopped before another update" in message
    assert "after model.layers.0.input_layernorm let out the token at position " in message
    assert all(option in message for option in ("--lr", "--level 0.2", "--sites", "--dry-run"))
    assert "train." not in message
    (kept,) = out.glob("resume/*/step-*.pt")
    assert kept.name.startswith(f"step-{step:08d}.")
    assert not (out / "export").exists()
    assert not (out / LAST_GOOD).exists()  # a gate that is not down yet leaves nothing to fold


def test_a_run_whose_norms_were_gone_by_then_leaves_a_model_that_exports(home, tmp_path, first_seen):
    token, step = first_at(first_seen, range(9, STEPS))
    out = tmp_path / "run"
    base = with_outlier(home, tmp_path / "model", token)
    with pytest.raises(Diverged, match=rf"at step {step};.* `tapernorm export --model {out}/last-good …` exports"):
        taper_model(request(home, out, model=str(base)))
    words = ["export", "--model", str(out / "last-good"), "--form", "normfree", "--out", str(tmp_path / "export")]
    assert main(words) == 0
    exported, last = tapernorm.load(tmp_path / "export"), load(out / "last-good")
    ids = torch.where(tokens() == token, token + 1, tokens())
    assert close(logits_of(exported, ids), logits_of(last, ids), 1e-5)
    assert (tmp_path / "export/tokenizer.json").is_file()
    card = (tmp_path / "export/README.md").read_text()
    assert f"- base: {base}\n" in card
    assert f"- data: {read_json(out / 'last-good/story.json')['base']['data']}\n- {step} optimizer steps" in card
    assert "\n\nNot measured.\n" in card
    assert not (exported.model.embed_tokens.weight == load_pretrained(base).model.embed_tokens.weight).all()


def held_out_alone(home: Path, folder: Path) -> tuple[int, int]:
    """A token that stands in the fewest held-out rows and in no batch, and how many rows it is that it spoils."""
    asked = request(home, folder, "llama")
    job, blocks = run_of(asked).job, blocks_of(asked)
    train, valid = (blocks["held-out", split] for split in ("train", "valid"))
    seen = {i for k in range(STEPS) for i in batch_of(train, seed=job.seed, step=k, batch=job.batch).flatten().tolist()}
    inputs = valid.rows[:, :-1].to(torch.int64)
    rows = {token: int((inputs == token).any(dim=1).sum()) for token in set(inputs.flatten().tolist()) - seen}
    return min(rows.items(), key=lambda pair: (pair[1], pair[0]))


@pytest.mark.parametrize("met", [True, False])
def test_held_out_rows_that_overflow_in_the_end_are_told_and_cost_nothing_else(home, tmp_path, capsys, met):
    token, rows = held_out_alone(home, tmp_path / "seen")
    out = tmp_path / "run"
    base = with_outlier(home, tmp_path / "model", token if met else own_models.VOCABULARY + 1)  # or one of no text
    assert main([*words_of(home, out), "--model", str(base)]) == 0
    shown = capsys.readouterr().out
    assert (f"; after not finite in {rows} row" in shown) == met
    assert re.search(rf"exported as \w+ to {re.escape(str(out / 'export'))}", shown)
    result = read_json(out / "result.json")
    assert (result["values"]["valid_ce"]["value"] is None) == met
    assert result["values"]["valid_ce"]["unit"] == "nats/token"
    scores = read_json(out / "scores.json")["corpora"]["held-out"]
    assert [scores[form]["rows"]["nonfinite"] for form in ("before", "after")] == [0, rows if met else 0]
    assert (scores["after"]["rows"]["mean"] is None) == met
    (line,) = [x for x in (out / "export/README.md").read_text().splitlines() if x.startswith("| held-out | after |")]
    assert ("| not finite | not finite |" in line, line.endswith(f" | {rows} |")) == (met, met)
    assert close(logits_of(tapernorm.load(out / "export"), tokens()), logits_of(load(out), tokens()), 1e-5)


def test_the_remedy_fits_the_job():
    remedies = {
        ("--lr", "--level 0.2", "--sites", "--dry-run"): ({}, {"sites": ("*.0.*",)}),
        ("--lr", "--level", "--sites", "--dry-run"): ({"level_weight": 0.2},),
        ("--lr",): ({"keep_norms": True}, {"keep_norms": True, "level_weight": 0.2}),
    }
    for options, requests in remedies.items():
        for more in requests:
            remedy = remedy_of(job_of(Request(**ASKED, **more), tiny("llama")))
            assert tuple(re.findall(r"--[a-z-]+(?: [\d.]+)?", remedy)) == options


# Another run in the same folder


def test_another_run_leaves_nothing_of_an_earlier_one(home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    assert main(words_of(home, out)) == 0
    gather = ["rows", "tapers", f"one={out}", "--run", "tiny", "--device", "cpu", "--out", str(tmp_path / "rows")]
    assert main([*gather, "--scale-tokens", "48"]) == 0
    (out / "last-good").mkdir()
    told = ("export", "last-good", "scores.json", "spread.json")
    assert all((out / name).exists() for name in told)

    def killed(*_):
        raise Stopped(signal.SIGKILL)

    earlier = {name: (out / name).read_bytes() for name in ("scores.json", "spread.json")}
    with monkeypatch.context() as patched:  # after the new run was published, and before it was scored
        patched.setattr(recipe, "take_scores", killed)
        with pytest.raises(Stopped):
            taper_model(request(home, out, seed=2, overwrite=True))
    assert not any((out / name).exists() for name in told)
    for name, content in earlier.items():  # and if they had stayed, nothing would take them for the new run's
        (out / name).write_bytes(content)
    words = ["export", "--model", str(out), "--form", "normfree", "--out", str(tmp_path / "export")]
    assert main(words) == 0
    card = (tmp_path / "export/README.md").read_text()
    assert "Not measured." in card
    assert "| held-out |" not in card
    assert main(gather) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_a_control_takes_the_place_of_a_taper_and_of_its_export_alone(home, tmp_path):
    out = tmp_path / "run"
    taper_model(request(home, out))
    assert (out / "export").is_dir()
    taper_model(request(home, out, keep_norms=True, overwrite=True))
    assert not (out / "export").exists()
    (out / "export").mkdir()
    (out / "export/mine.txt").write_text("no export")
    taper_model(request(home, out, keep_norms=True, seed=2, overwrite=True))
    assert (out / "export/mine.txt").is_file()


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--dry-run"]])
def test_the_models_own_folder_is_no_output_folder(home, tmp_path, capsys, more):
    model = Path(shutil.copytree(home / "gpt2", tmp_path / "model"))
    before = {path: path.read_bytes() for path in model.iterdir()}
    (tmp_path / "link").symlink_to(model)
    for out in (model, tmp_path / "link"):
        assert main([*words_of(home, out), "--model", str(model), *more]) == 2
        assert "is the folder of --model" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in model.iterdir()} == before


def test_another_job_is_refused_before_the_text_of_the_first_one_is_replaced(home, finished, tmp_path, capsys):
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    shared = ["--final", "--score", f"more={home / 'more.txt'}"]
    for more, told in ((["--seed", "2"], "seed 1 there, 2 here"), (["--data", str(home / "more.txt")], "text ")):
        assert main([*words_of(home, out), *shared, *more]) == 2
        assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["data/held-out/blocks/train.bin", "scores.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")], ids=["gone", "cut"])
def test_what_is_damaged_of_a_finished_run_is_made_again(home, finished, tmp_path, capsys, name, damage):
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    before = (out / name).read_bytes()
    damage(out / name)
    assert main([*words_of(home, out), "--final", "--score", f"more={home / 'more.txt'}"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    if name == "scores.json":
        assert read_json(out / name)["corpora"] == json.loads(before)["corpora"]
    else:
        assert (out / name).read_bytes() == before


# A form that fails


def test_where_one_form_fails_the_other_is_written_and_the_exit_code_says_so(home, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise FormFailed("the stock form is not the folded model")

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(export, "_require_same", fails)
        assert main([*words_of(home, out), "--final"]) == 3
    said = capsys.readouterr()
    assert "stock" in said.err
    assert "the stock form is not the folded model" in said.err
    assert re.search(r"held-out: before \d.*\nheld-out: WORSE|held-out: before \d.*\nexported as normfree", said.out)
    assert close(logits_of(tapernorm.load(out / "export"), tokens()), logits_of(load(out), tokens()), 1e-5)
    assert main([*words_of(home, out), "--final"]) == 0  # and now the form that was wanted
    assert "exported as stock" in capsys.readouterr().out


def test_where_no_form_can_be_written_the_scores_are_told_all_the_same(home, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise FormFailed("its logits are not finite")

    monkeypatch.setattr(SelfCheck, "of", fails)
    assert main([*words_of(home, tmp_path / "run"), "--final"]) == 3
    said = capsys.readouterr()
    assert said.err.count("its logits are not finite") == 2
    assert "nothing exported" in said.out
    assert "held-out: before" in said.out
    assert not (tmp_path / "run/export").exists()


def test_a_model_that_is_worse_than_guessing_is_told_in_capitals_and_in_its_card(home, tmp_path, capsys):
    words = [*words_of(home, tmp_path / "run"), "--final", "--lr", "0.3"]
    assert main(words) in (0, 3)
    assert re.search(r"held-out: WORSE THAN A UNIFORM GUESS.*guess costs 5\.74", capsys.readouterr().out)
    assert "WORSE THAN A UNIFORM GUESS" in (tmp_path / "run/export/README.md").read_text()
    better = {"held-out": {"after": {"rows": {"mean": 5.7}, "uniform": 5.74}}}
    assert not list(worse_than_guessing(better))


# Norms of one's choice, and levelled scales


def test_norms_of_ones_choice_go_and_the_others_stay_norms(home, tmp_path):
    out = tmp_path / "run"
    words = ["--model", str(home / "llama"), "--sites", "*.post_*", "model.layers.1.*", "--level", "0.2"]
    assert main([*words_of(home, out), *words]) == 0
    last = ("0.post_attention_layernorm", "1.input_layernorm", "1.post_attention_layernorm")
    gone = [f"model.layers.{name}" for name in last]
    result = read_json(out / "result.json")
    assert list(result["norms"]) == gone
    assert result["job"]["sites"] == ["*.post_*", "model.layers.1.*"]
    assert result["job"]["level_weight"] == 0.2
    exported = tapernorm.load(out / "export")
    assert type(exported.model.layers[0].input_layernorm).__name__ == "LlamaRMSNorm"
    assert type(exported.model.norm).__name__ == "LlamaRMSNorm"
    assert all(type(exported.get_submodule(name)).__name__ == "Identity" for name in gone)
    assert close(logits_of(exported, tokens()), logits_of(load(out), tokens()), 1e-5)


def test_a_levelled_run_that_was_cut_ends_as_one_that_was_not(home, tmp_path, monkeypatch):
    levelled = {"level_weight": 0.2, "precision": "bf16"}
    whole = taper_model(request(home, tmp_path / "whole", **levelled))
    assert whole != taper_model(request(home, tmp_path / "plain", precision="bf16"))
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["aux"] > 0  # from the first step on, before the gate falls
    stock = Trainer.step
    cut_at(10, request(home, tmp_path / "cut", **levelled), monkeypatch)

    started = []

    def start(trainer, k):
        started.append((trainer.plan.hardware.micro_batch, k))
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", start)
    with pytest.raises(UserError, match="micro_batch 2 there, 1 here"):  # other micro-batches are another run
        taper_model(request(home, tmp_path / "cut", micro_batch=1, **levelled))
    with pytest.raises(Stopped):
        taper_model(request(home, tmp_path / "cut", **levelled))
    assert started == [(2, 10)]
    monkeypatch.setattr(Trainer, "step", stock)
    assert taper_model(request(home, tmp_path / "cut", **levelled)) == whole


def test_a_control_is_the_same_training_with_every_norm_kept(home, finished, tmp_path, capsys):
    assert main(words_of(home, tmp_path / "run", "--keep-norms", "--dry-run")) == 0
    assert "; 0 norms " in capsys.readouterr().out
    assert main(words_of(home, tmp_path / "run", "--keep-norms")) == 0
    kept = [type(module) for module in load(tmp_path / "run").modules() if isinstance(module, torch.nn.LayerNorm)]
    assert kept == [torch.nn.LayerNorm] * 5
    assert not (tmp_path / "run/export").exists()
    control, tapered = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (tmp_path / "run", finished)
    )
    start = read_json(finished / "result.json")["job"]["taper"]["start"]
    assert {row["gate"] for row in control} == {1.0}
    assert [row["ce"] for row in control[: start + 1]] == [row["ce"] for row in tapered[: start + 1]]
    assert control[-1]["ce"] != tapered[-1]["ce"]
    scores = read_json(tmp_path / "run/scores.json")["corpora"]["held-out"]
    model = load(tmp_path / "run")
    ids = Blocks.open(tmp_path / "run/data/held-out/blocks", "valid").rows.to(torch.int64)
    with torch.no_grad():
        logits = logits_of(model, ids)[:, :-1]
    assert scores["after"]["rows"]["mean"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), rel=1e-5
    )
    assert main(words_of(home, tmp_path / "other", "--keep-norms", "--final")) == 2
    assert "--final" in capsys.readouterr().err


def test_a_levelled_control_has_the_level_loss_of_its_taper_and_keeps_every_norm(home, tmp_path, monkeypatch):
    levelled = {"level_weight": 0.2, "sites": ("*.ln_1",)}
    taper_model(request(home, tmp_path / "taper", **levelled))
    taper_model(request(home, tmp_path / "control", keep_norms=True, **levelled))
    taper_model(request(home, tmp_path / "plain", keep_norms=True))
    tapered, control, plain = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("taper", "control", "plain")
    )
    start = read_json(tmp_path / "taper/result.json")["job"]["taper"]["start"]
    for key in ("ce", "aux", "grad_norm"):
        assert [row[key] for row in control[:start]] == [row[key] for row in tapered[:start]]
        # The step at k_start is the first with fixed levels. Its gate is 1 still, and the mixing form rounds.
        assert control[start][key] == pytest.approx(tapered[start][key], rel=1e-4)
        assert control[-1][key] != tapered[-1][key]
    assert {row["gate"] for row in control} == {1.0}
    assert min(row["aux"] for row in control) > 0
    assert {row["aux"] for row in plain} == {0.0}
    assert control[-1]["ce"] != plain[-1]["ce"]
    model = load(tmp_path / "control")
    assert [type(m) for m in model.modules() if isinstance(m, torch.nn.LayerNorm)] == [torch.nn.LayerNorm] * 5
    assert model.state_dict().keys() == load(tmp_path / "plain").state_dict().keys()
    result, other = (read_json(tmp_path / name / "result.json") for name in ("control", "plain"))
    assert (result["norms"], result["job"]["method"], result["job"]["taper"]) == ({}, "vanilla", None)
    assert result["values"]["parameters"] == other["values"]["parameters"]
    assert not (tmp_path / "control/export").exists()

    stock = Trainer.step
    cut_at(10, request(home, tmp_path / "cut", keep_norms=True, **levelled), monkeypatch)
    monkeypatch.setattr(Trainer, "step", stock)
    taper_model(request(home, tmp_path / "cut", keep_norms=True, **levelled))
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "control/model.safetensors").read_bytes()


def test_every_setting_of_a_levelled_control_defines_it():
    asked = [
        {"keep_norms": keep, "level_weight": level, "final": final, "sites": sites}
        for keep, level, final, sites in [
            (True, 0.2, False, None),
            (True, 0.1, False, None),
            (True, 0.2, True, None),
            (True, 0.2, False, ("*.0.*",)),
            (True, 0.0, False, None),
            (False, 0.2, False, None),
        ]
    ]
    jobs = [job_of(Request(**ASKED, **one), tiny("llama")) for one in asked]
    assert len({fingerprint_of(job, {}) for job in jobs}) == len(jobs)
    assert [job.levels_fixed_at for job in jobs] == [30, 30, 30, 30, None, None]
    with pytest.raises(ValueError, match="levels_fixed_at=None"):
        TaperJob(**{**dict(jobs[0]), "levels_fixed_at": None})
    with pytest.raises(ValueError, match="levels_fixed_at=30"):
        TaperJob(**{**dict(jobs[5]), "levels_fixed_at": 30})


def test_settings_are_those_of_the_paper_until_more_is_asked_for():
    paper = job_of(Request(**ASKED), tiny("llama"))
    more = job_of(Request(**ASKED, sites=("*.0.*",)), tiny("llama"))
    assert dict(more) == {**dict(paper), "sites": ("*.0.*",)}
    assert dict(job_of(Request(**ASKED, final=True), tiny("llama"))) == {**dict(paper), "final": True}
    levelled = job_of(Request(**ASKED, level_weight=0.2), tiny("llama"))
    assert (levelled.level_weight, levelled.aux_weight) == (0.2, 0.0)  # one loss on the scales, not two


@pytest.mark.parametrize(
    ("options", "fingerprint"),
    [
        ({}, "27c3d47a9c4fe12c"),
        ({"final": True}, "2d989f09485e81f1"),
        ({"keep_norms": True}, "299f925c02f00112"),
        ({"sites": ("*.0.*",)}, "d5fb541886309a0f"),
        ({"level_weight": 0.2, "final": True}, "fd3e4ab61f127895"),
    ],
)
def test_run_folders_of_earlier_versions_are_known_by_the_same_fingerprint(options, fingerprint):
    """The fingerprints that these jobs had when a taper was a fine-tune of a GPT-2."""
    assert fingerprint_of(job_of(Request(**ASKED, **options), tiny("llama")), {}) == fingerprint


def test_the_micro_batch_defines_a_levelled_run_and_no_other(home, tmp_path):
    for more, counts in (({"level_weight": 0.2}, True), ({"sites": ("*.0.*",)}, False), ({}, False)):
        asked = [request(home, tmp_path, "llama", batch=6, **{**more, "micro_batch": rows}) for rows in (2, 3, 9)]
        runs = [run_of(one) for one in asked]
        assert [run.job.micro_batch for run in runs] == ([2, 3, 6] if counts else [None] * 3)
        assert len({fingerprint_of(run.job, {}) for run in runs}) == (3 if counts else 1)
        assert [run.hardware.micro_batch for run in runs] == [2, 3, 6]
    with pytest.raises(ValueError, match="micro_batch=None do not go together"):
        TaperJob(**{**dict(job_of(Request(**ASKED, level_weight=0.2), tiny("llama"))), "micro_batch": None})


# Settings


@pytest.mark.parametrize(
    ("parameters", "lr", "weight", "tokens"),
    [(1e6, 1e-3, 0.1, 4096), (124e6, 6e-4, 0.1, 65536), (774e6, 3e-4, 0.1, 131072), (7e9, 1e-4, 0.01, 131072)],
)
def test_defaults_follow_the_size(parameters, lr, weight, tokens, monkeypatch):
    monkeypatch.setattr("tapernorm_lab.own_model.job.parameter_count", lambda _: parameters)
    job = job_of(Request(model="", data=(), steps=300, out=Path(), device="cpu"), tiny("gpt2"))
    assert (job.lr, job.aux_weight, job.batch * job.context) == (lr, weight, tokens)
    assert (job.taper.start, job.taper.end, job.steps, job.warmup_steps) == (30, 210, 300, 15)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "17"], "--context 17 "),
        (["--form", "stock"], "transformer.ln_f would stop normalising"),
        (["--sites", "*.ln_3"], "'*.ln_3' matches no internal norm"),
        (["--model", "no/such model"], "no model 'no/such model'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(home, tmp_path, words, message, capsys):
    assert main([*words_of(home, tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("tapernorm: ")
    assert not (tmp_path / "run/model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "an export needs --model, --form, --out"),
        (["--check", "x", "--out", "y"], "--check takes no --out"),
        (["--model", "x", "--form", "stock"], "an export needs --out"),
    ],
)
def test_export_takes_a_run_or_a_folder_to_check(words, said, capsys):
    assert main(["export", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_form_that_has_no_such_weights_is_refused_before_the_model_is_read(tmp_path, capsys):
    words = ["export", "--model", str(tmp_path / "absent"), "--form", "stock", "--dtype", "float16"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "float16" in capsys.readouterr().err
