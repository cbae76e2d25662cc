"""Tokenizers of transformers as coders: what they make of a text, marks at its ends, and what is refused."""

import json
from pathlib import Path

import pytest
from own_models import BOS, EOS, SPARE, story, tokenizer
from refusals import refused
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tapernorm.util.errors import UserError
from tapernorm_lab.data.hf_tokenizer import save_hub_tokenizer
from tapernorm_lab.data.tokenizers import open_tokenizer

CASES = {"bos and eos": (True, True), "eos alone": (False, True), "bos alone": (True, False)}
ODD = " \t\n\n  naïve 中 👩‍👩‍👧 e\u0301 \u2581 don't"


@pytest.fixture(params=CASES)
def folders(request, tmp_path):
    bos, eos = CASES[request.param]
    tokenizer(bos=bos, eos=eos).save_pretrained(tmp_path / "source")
    return tmp_path / "source", tmp_path / "out", bos, eos


def coder_of(folders):
    source, out, *_ = folders
    save_hub_tokenizer(source, out, vocab_size=len(AutoTokenizer.from_pretrained(source)) + SPARE)
    return open_tokenizer(out)


def test_ids_are_those_of_transformers_and_the_separator_stands_at_no_end(folders):
    coder, (_, _, bos, eos) = coder_of(folders), folders
    own = AutoTokenizer.from_pretrained(folders[0])
    assert coder.eod == own.convert_tokens_to_ids(EOS if eos else BOS)
    for text in [story(3), ODD, "", "x"]:
        ids = own(text)["input_ids"]
        expected = ids if bos == eos or not bos else ids[1:]  # BOS ends documents: it does not begin them as well
        assert coder.encode(text) == expected
        assert coder.encode_batch([text, text]) == [expected, expected]
        assert coder.decode([*expected, coder.eod]) == text
    assert (coder.encode("x")[0] == own.convert_tokens_to_ids(BOS)) == (bos and eos)
    assert coder.vocab_size == len(own) + SPARE


def test_the_literal_text_of_a_mark_is_text(folders):
    coder = coder_of(folders)
    text = f"a {EOS} b {BOS}"
    ids = coder.encode(text)
    assert coder.eod not in ids
    assert coder.decode(ids) == text
    assert coder.eod in AutoTokenizer.from_pretrained(folders[0])(text)["input_ids"]  # transformers reads it as a mark


def test_the_copy_loads_in_transformers_and_is_refused_when_changed(folders):
    coder, out = coder_of(folders), folders[1]
    assert AutoTokenizer.from_pretrained(out)("the cat")["input_ids"][-1] == coder.encode("the cat")[-1]
    path = out / coder.manifest["opened"]
    content = path.read_text()
    path.write_text("{}")
    with pytest.raises(UserError, match="differs from its manifest"):
        open_tokenizer(out)
    path.write_text(content)
    assert open_tokenizer(out).encode("the cat") == coder.encode("the cat")


def test_a_folder_that_an_earlier_version_wrote_is_opened(folders):
    coder, out = coder_of(folders), folders[1]
    (out / coder.manifest["opened"]).rename(out / "tokenizer.json")
    manifest = {key: value for key, value in coder.manifest.items() if key != "opened"}
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert open_tokenizer(out).encode(story(3)) == coder.encode(story(3))


# What the base's files were saved with


LONG = " ".join(story(i) for i in range(3))


def saved_with(folder, *, truncation: bool, padding: bool):
    """Save into tokenizer.json what a data loader had switched on."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if truncation:
        backend.enable_truncation(max_length=24)
    if padding:
        backend.enable_padding(length=600)
    backend.save(str(folder / "tokenizer.json"))
    return backend


@pytest.mark.parametrize(("truncation", "padding"), [(True, False), (False, True), (True, True)])
def test_truncation_and_padding_of_the_file_are_switched_off(folders, tmp_path, truncation, padding):
    source, *_ = folders
    plain = coder_of(folders).encode(LONG)
    saved = saved_with(source, truncation=truncation, padding=padding)
    assert len(saved.encode(LONG).ids) == (600 if padding else 24)  # control
    save_hub_tokenizer(source, tmp_path / "again", vocab_size=len(AutoTokenizer.from_pretrained(source)) + SPARE)
    coder = open_tokenizer(tmp_path / "again")
    assert coder.encode(LONG) == plain
    assert coder.encode_batch([LONG, "x"]) == [plain, coder.encode("x")]


FILES = {
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "special_tokens_map.json": '{ "eos_token":"<|end|>" }',
    "vocab.json": "{}",
    "README.md": "no file of a tokenizer",
}


def test_the_files_of_the_base_are_copied_as_they_were(folders, tmp_path):
    source, out, *_ = folders
    for name, content in FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    saved_with(source, truncation=True, padding=False)
    before = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    coder = coder_of(folders)
    copied = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert copied.keys() - before.keys() == {"manifest.json", coder.manifest["opened"]}
    assert before.keys() - copied.keys() == {"README.md"}
    assert all(copied[name] == before[name] for name in before.keys() & copied.keys())
    assert coder.manifest["files"].keys() == copied.keys() - {"manifest.json"}


def test_marks_that_only_the_class_of_a_model_tells_travel_too(tmp_path):
    """A repository of GPT-2: its tokenizer_config.json names no class, which follows from the model's config."""
    source = tmp_path / "source"
    made = tokenizer(bos=False)
    made.add_special_tokens({"eos_token": "<|endoftext|>"})
    made.save_pretrained(source)
    (source / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    save_hub_tokenizer(source, tmp_path / "out", vocab_size=len(made) + SPARE)
    assert (tmp_path / "out/tokenizer_config.json").read_text() == '{"model_max_length": 1024}'
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"


# Ids that do not belong together


def edited(folder: Path, name: str, edit) -> Path:
    """The folder of a tokenizer, one of its JSON files changed."""
    tokenizer(bos=True).save_pretrained(folder)
    content = json.loads((folder / name).read_text())
    edit(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def move(token_id, to):
    def edit(content):
        vocabulary = content["model"]["vocab"]
        vocabulary[next(piece for piece, number in vocabulary.items() if number == token_id)] = to

    return edit


def add(content):
    content["added_tokens"].append({**content["added_tokens"][0], "id": 305, "content": "<far>"})


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("tokenizer.json", move(299, 5000), ["id 5000", "end at 311", "tokenizer.json"]),
        ("tokenizer.json", add, ["'<far>'", "id 305", "300", "tokenizer.json"]),
        ("tokenizer.json", lambda c: c["post_processor"]["special_tokens"][BOS].update(ids=[999]), ["id 999"]),
        ("tokenizer.json", move(299, -5), ["-5"]),
        ("tokenizer.json", lambda c: c["model"].update(vocab=None), ["tokenizer.json"]),
        ("tokenizer_config.json", lambda c: c.update(eos_token="<none>"), ["'<none>'", "eos_token"]),
        ("tokenizer_config.json", lambda c: c.update(eos_token=5), ["eos_token"]),
        ("tokenizer_config.json", lambda c: c.update(eos_token={"a": 1}), ["eos_token"]),
    ],
)
def test_ids_that_do_not_belong_together_are_refused_in_one_line(tmp_path, name, edit, words):
    source = edited(tmp_path / "source", name, edit)
    with refused(*words, str(source)):
        save_hub_tokenizer(source, tmp_path / "out", vocab_size=312)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma", "llama"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, kind):
    """Of some models transformers makes a tokenizer without a vocabulary then, and says nothing."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError, match=r"put its tokenizer.json there"):
        save_hub_tokenizer(tmp_path / "source", tmp_path / "out", vocab_size=312)


def test_a_hole_among_the_ids_of_the_model_is_no_fault(tmp_path):
    """The control of the test above: every token keeps the id that its file gives it."""
    source = edited(tmp_path / "source", "tokenizer.json", move(299, 311))
    save_hub_tokenizer(source, tmp_path / "out", vocab_size=312)
    assert (
        open_tokenizer(tmp_path / "out").encode(story(3)) == AutoTokenizer.from_pretrained(source)(story(3)).input_ids
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "\0", "", "[]", '{"a', "caf\udce9"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, content):
    source = tmp_path / "source"
    tokenizer(bos=True).save_pretrained(source)
    (source / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with refused(str(source)):
        save_hub_tokenizer(source, tmp_path / "out", vocab_size=312)


def test_what_cannot_serve_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"put its tokenizer.json there"):
        save_hub_tokenizer(tmp_path, tmp_path / "out", vocab_size=5)
    tokenizer(bos=False, eos=False).save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="name one as eos_token"):
        save_hub_tokenizer(tmp_path / "endless", tmp_path / "out", vocab_size=5000)
    tokenizer(bos=False).save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match=r"300 ids.* 29:"):
        save_hub_tokenizer(tmp_path / "large", tmp_path / "out", vocab_size=29)
    assert not (tmp_path / "out").exists()


def test_code_beside_a_tokenizer_is_not_run(tmp_path):
    made = Tokenizer(models.WordLevel({"a": 0, "<e>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>").save_pretrained(tmp_path / "source")
    (tmp_path / "source/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = json.loads((tmp_path / "source/tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="custom code"):
        save_hub_tokenizer(tmp_path / "source", tmp_path / "out", vocab_size=9)
    assert not (tmp_path / "ran").exists()
