"""The verbs `spread` and `outcome` on a finished taper: what they measure, skip, refuse and write."""

from pathlib import Path

import pytest
import torch
from own_models import write_model, write_stories
from taper_runs import run_of

from tapernorm import spread
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.checkpoints.store import load
from tapernorm.util.atomic_files import read_json
from tapernorm_lab.cli.main import main
from tapernorm_lab.data.blocks import Blocks
from tapernorm_lab.data.tokenizers import open_tokenizer, piece_of
from tapernorm_lab.own_model import scales_before_after as spreadfile
from tapernorm_lab.own_model.options import Request
from tapernorm_lab.own_model.taper_own_model import taper_model

CPU = ["--device", "cpu"]
TOKENS = 96  # six rows of 16


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "llama", "llama")
    write_stories(folder / "train.txt")
    return folder


@pytest.fixture(scope="module")
def run(home) -> Path:
    sizes = {"batch": 3, "valid_fraction": 0.2, "threads": 1, "device": "cpu"}
    base = {"model": str(home / "llama"), "data": (str(home / "train.txt"),), "steps": 12, "out": home / "run"}
    taper_model(run_of(Request(**base, **sizes)))
    assert main(measuring(home / "run", home / "rows", TOKENS)) == 0
    return home / "run"


def measuring(run: Path, out: Path, tokens: int | None) -> list[str]:
    """The words that measure the scales of `run`, on so many tokens, and gather them."""
    more = [] if tokens is None else ["--scale-tokens", str(tokens)]
    return ["rows", "tapers", f"all={run}", "--run", "tiny", "--caption", "A trial.", *more, "--out", str(out), *CPU]


def held_out(run: Path) -> torch.Tensor:
    return Blocks.open(run / "data/held-out/blocks", "valid").rows[: TOKENS // 16].to(torch.int64)


def test_both_forms_are_measured_on_the_held_out_rows(home, run):
    told, rows = read_json(run / "spread.json"), held_out(run)
    assert (told["rows"], told["context"]) == rows.shape
    coder = open_tokenizer(run / "tokenizer")
    for form, model in {"before": load_pretrained(home / "llama"), "after": load(run)}.items():
        expected = spread.measure(model, rows, batch=4)
        assert [entry["norm"] for entry in told["norms"]] == list(expected)
        for entry in told["norms"]:
            found, one = entry[form], expected[entry["norm"]]
            assert found["first"] == one.first
            assert found["quantiles"] == {f"{q:g}": value for q, value in one.quantiles.items()}
            worst, outlier = found["worst"][0], one.worst[0]
            assert (worst["scale"], worst["position"]) == (outlier.scale, outlier.position)
            assert worst["piece"] == piece_of(coder, rows[outlier.row].tolist(), outlier.position)
    before, after = ([entry[form]["first"] for entry in told["norms"][1:]] for form in ("before", "after"))
    assert all(a != b for a, b in zip(before, after, strict=True))  # the control: the forms differ


def test_the_constants_are_those_of_the_norms_that_are_gone(run):
    trained = read_json(run / "result.json")["norms"]
    found = {entry["norm"]: entry["c"] for entry in read_json(run / "spread.json")["norms"]}
    assert found == {name: pytest.approx(norm["c"], rel=1e-6) for name, norm in trained.items()} | {"model.norm": None}


def test_what_was_measured_is_not_measured_again_and_more_tokens_are(run, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("measured again")

    before = (run / "spread.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(spreadfile, "measure", never)
        for tokens in (TOKENS, None):
            assert main(measuring(run, tmp_path, tokens)) == 0
        assert (run / "spread.json").read_bytes() == before
        with pytest.raises(AssertionError, match="measured again"):
            main(measuring(run, tmp_path, 48))


def test_another_base_model_than_the_runs_is_refused(home, run, tmp_path, capsys):
    config = home / "llama/config.json"
    before = config.read_bytes()
    config.write_bytes(before + b"\n")
    assert main(measuring(run, tmp_path / "rows", 48)) == 2
    config.write_bytes(before)
    assert f"{home / 'llama'} has changed" in capsys.readouterr().err
    assert main(measuring(tmp_path, tmp_path / "rows", None)) == 2
    assert f"{tmp_path} holds no result.json" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path, capsys):
    assert main(measuring(tmp_path / "typo", tmp_path / "rows", None)) == 2
    assert "holds no result.json" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_tables_and_figure_are_written_and_are_the_same_bytes_again(run, tmp_path):
    for name in ("one", "two"):
        out = tmp_path / name
        assert main(measuring(run, out / "rows", None)) == 0
        for verb in ("table", "figure"):
            assert main([verb, "tapers", "--results", str(out), "--out", f"{out}/{verb}s"]) == 0
    tables = [f"{stem}.{kind}" for stem in ("norms_all", "scores") for kind in ("csv", "md", "tex")]
    figures = [f"figure_spread_all.{kind}" for kind in ("csv", "md", "pdf", "png", "tex")]
    for folder, names in {"tables": tables, "figures": figures}.items():
        assert (
            sorted(path.name for path in (tmp_path / "one" / folder).glob("[!.]*") if path.suffix != ".html") == names
        )
        for name in names:
            one, two = ((tmp_path / which / folder / name).read_bytes() for which in ("one", "two"))
            assert one == two
    shown = (tmp_path / "one/tables/scores.md").read_text()
    after = read_json(run / "scores.json")["corpora"]["held-out"]["after"]
    assert f"| held-out | all        |     4 of 5 |    {after['bits_per_byte']:.4f} |" in shown
