"""The text of a request: split, told of, and known where it is scored and trained on."""

import json
from pathlib import Path

import own_models
import pytest
from own_models import SPARE, story, write_model, write_stories
from taper_runs import run_of

from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.data.hf_tokenizer import save_hub_tokenizer
from tapernorm_lab.data.tokenizers import open_tokenizer
from tapernorm_lab.own_model import own_text as owntext
from tapernorm_lab.own_model.options import Request, check

CONTEXT = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "gpt2")
    write_stories(folder / "train.txt")
    write_stories(folder / "other.txt", 5, first=1000)
    save_hub_tokenizer(folder / "gpt2", folder / "tokenizer", vocab_size=own_models.VOCABULARY + SPARE)
    (folder / "book.txt").write_text("\n\n".join(story(i) for i in range(200)))
    return folder


def request(home: Path, out: Path, data: str = "train.txt", **scored: str) -> Request:
    texts = tuple((name, str(home / text)) for name, text in scored.items())
    base = {"model": str(home / "gpt2"), "data": (str(home / data),), "steps": 12, "out": out, "valid_fraction": 0.2}
    return Request(**base, scored=texts, batch=2, threads=1, device="cpu")


def looked(home: Path, asked: Request) -> list[str]:
    return owntext.check_texts(check(asked), open_tokenizer(home / "tokenizer"), CONTEXT)


def test_a_book_is_trained_on_and_held_out_in_passages_and_that_is_told(home, tmp_path, capsys):
    asked = request(home, tmp_path, "book.txt")
    told = looked(home, asked)
    blocks = owntext.prepare(run_of(asked))
    assert capsys.readouterr().err.splitlines() == told
    assert "one document" in told[0]
    lines = {
        split: (tmp_path / f"data/held-out/corpus/{split}.jsonl").read_text().splitlines()
        for split in ("train", "valid")
    }
    texts = {split: [json.loads(line)["text"] for line in found] for split, found in lines.items()}
    stories = {split: set("\n\n".join(found).split("\n\n")) - {""} for split, found in texts.items()}
    assert stories["train"] | stories["valid"] == {story(i) for i in range(200)}
    assert not stories["train"] & stories["valid"]
    assert len(blocks["held-out", "valid"].rows) > 20


OVERLAPS = {
    "all of the text": ("train.txt", "train.txt", "54 of its 60"),  # the others are held out
    "a book": ("book.txt", "book.txt", "1 of its 1"),
    "another text": ("train.txt", "other.txt", None),
    "a part of it": ("train.txt", "part.txt", "2 of its 3"),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_a_scored_text_that_is_trained_on_is_told_by_its_documents(home, tmp_path, capsys, case):
    data, scored, count = OVERLAPS[case]
    trained = [json.loads(line)["text"] for line in trained_lines(home, tmp_path / "train")]
    (home / "part.txt").write_text("<|endoftext|>".join([trained[3], story(5000), trained[7]]))
    asked = request(home, tmp_path / "run", data, more=scored)
    told = [line for line in looked(home, asked) if line.startswith("--score")]
    owntext.prepare(run_of(asked))
    seen = owntext.seen_in_training(tmp_path / "run")
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("--score")] == told
    if count is None:
        assert (told, seen) == ([], {})
        return
    (line,) = told
    assert all(word in line for word in (f"more={home / scored}", str(home / data), count))
    documents, of = map(int, count.split(" of its "))
    assert seen == {"more": {"documents": documents, "of": of}}


def trained_lines(home: Path, out: Path) -> list[str]:
    owntext.prepare(run_of(request(home, out)))
    return (out / "data/held-out/corpus/train.jsonl").read_text().splitlines()


def test_another_text_forgets_what_was_seen_of_an_earlier_one(home, tmp_path):
    first, other = (run_of(request(home, tmp_path, more=text)) for text in ("train.txt", "other.txt"))
    owntext.prepare(first)
    assert owntext.seen_in_training(tmp_path)
    owntext.prepare(other)
    assert owntext.seen_in_training(tmp_path) == {}


def test_what_was_seen_in_training_stands_beside_its_score_and_in_the_card(home, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--model", str(home / "gpt2"), "--data", str(home / "train.txt"), "--steps", "12", "--batch", "2"]
    words += ["--valid-fraction", "0.2", "--device", "cpu", "--threads", "1", "--out", str(out)]
    texts = [f"same={home / 'train.txt'}", f"other={home / 'other.txt'}"]
    assert main(["taper", *words, "--score", *texts]) == 0
    shown = capsys.readouterr()
    assert "\nsame (seen in training): before " in shown.out
    assert "\nother: before " in shown.out
    card = (out / "export/README.md").read_text()
    assert "**same was seen in training: 54 of its 60 documents.**" in card
    assert "other was seen" not in card
    assert read_json(out / "scores.json")["corpora"].keys() == {"held-out", "same", "other"}


def test_of_a_long_text_no_more_is_read_than_tells(home, tmp_path, monkeypatch):
    """What lies beyond is not looked at; the control looks at all of it."""
    path = tmp_path / "long.jsonl"
    lines = [json.dumps({"text": story(i)}) for i in range(300)]
    path.write_text("\n".join([*lines, "damaged"]))
    asked = Request(model="m", data=(str(path),), steps=12, out=tmp_path, valid_fraction=0.2)
    coder = open_tokenizer(home / "tokenizer")
    with pytest.raises(UserError, match=r"long.jsonl:301: not JSON"):
        owntext.check_texts(check(asked), coder, CONTEXT)
    monkeypatch.setattr(owntext, "_READ", 1000)
    assert owntext.check_texts(check(asked), coder, CONTEXT) == []
