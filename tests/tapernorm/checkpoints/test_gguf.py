"""A model in one GGUF file is the model that was written there, and what the reader has no place for is refused."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import SIZES, made, write_gguf
from own_models import EOS, story, tokenizer, write_stories
from places import ROOT
from refusals import refused

import tapernorm
from tapernorm.architectures import has_tied_head, logits_of
from tapernorm.checkpoints.pretrained import config_of, find, licence_of, load_pretrained, model_digest, skeleton
from tapernorm.checkpoints.store import load
from tapernorm.folding import fold
from tapernorm.util.atomic_files import read_json, sha256_of
from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.data.hf_tokenizer import HFTokenizer, save_hub_tokenizer

Q = gguf.GGMLQuantizationType
SMOLLM2 = ROOT / "build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biased, a head per key": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": SIZES["num_attention_heads"]},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
}
IDS = torch.randint(48, (2, 17), generator=torch.Generator().manual_seed(5))


# The model


@pytest.mark.parametrize("case", CASES)
def test_a_file_and_a_folder_of_safetensors_give_the_same_model(case, tmp_path):
    architecture, overrides = CASES[case]
    model = made(architecture, **overrides)
    model.save_pretrained(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", model, architecture)
    ours, theirs = load_pretrained(find(path)), load_pretrained(tmp_path / "folder")
    assert type(ours) is type(theirs)
    assert not ours.training
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    assert torch.equal(logits_of(ours, IDS), logits_of(theirs, IDS))
    assert has_tied_head(ours) == has_tied_head(theirs)
    bare = skeleton(path)
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    assert {n: p.shape for n, p in bare.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}


def test_rows_of_a_head_that_are_not_laid_back_give_another_model(tmp_path):
    model = made()
    wrong = load_pretrained(write_gguf(tmp_path / "model.gguf", model, pair=False))
    assert (logits_of(wrong, IDS) - logits_of(model, IDS)).abs().max() > 0.1


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_packed_weights_are_spread_out_as_llama_cpp_spreads_them(kind, tmp_path):
    model = made("qwen2")
    ours = load_pretrained(write_gguf(tmp_path / "model.gguf", model, "qwen2", packed=kind))
    for name, values in model.state_dict().items():
        wanted = values
        if values.ndim == 2 and ".layers." in name:
            wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind))
            assert not torch.equal(wanted, values)
        assert torch.equal(ours.state_dict()[name], wanted), name


def test_transformers_reads_the_same_from_the_file(tmp_path):
    known = tokenizer(bos=False)  # its length is the size of the vocabulary, there
    path = write_gguf(tmp_path / "model.gguf", made(vocab_size=len(known)), packed=Q.Q4_1, tokenizer=known)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = load_pretrained(path)
    assert torch.equal(logits_of(ours, IDS), logits_of(theirs, IDS))
    assert not hasattr(ours, "hf_quantizer")  # theirs is of packed weights, and would be saved as that


def test_the_precision_is_the_one_that_is_asked_for(tmp_path):
    loaded = load_pretrained(write_gguf(tmp_path / "model.gguf", made()), torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_what_a_file_is_known_by(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", made())
    assert model_digest(path) == sha256_of(path)
    assert licence_of(path) == "apache-2.0"
    _, config = config_of(path)
    assert config.rms_norm_eps == SIZES["rms_norm_eps"]
    assert config.rope_parameters["rope_theta"] == 500.0


# What is refused


def one(value: float):
    return lambda writer: writer.add_rope_scaling_factor(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"say": one(8.0)}, r"llama\.rope\.scaling\.factor = 8\.0"),
        ({"say": lambda w: w.add_expert_count(4)}, r"llama\.expert_count = 4"),
        ({"say": lambda w: w.add_key_length(24)}, r"16 of the 24 .*rope\.dimension_count"),
        ({"more": {"rope_freqs.weight": np.ones(8, np.float32)}}, "unexpected: rope_freqs.weight"),
        ({"packed": Q.Q5_1}, "of ggml type 7, which is not supported yet"),
        ({"without": ("model.layers.1.mlp.up_proj.weight",)}, "missing: model.layers.1.mlp.up_proj.weight"),
        ({"without": ("model.embed_tokens.weight",)}, "lacks token_embd.weight"),
    ],
)
def test_a_file_that_says_or_holds_what_has_no_place_is_refused(options, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", made(), **options)
    with pytest.raises(UserError, match=message):
        load_pretrained(path)


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_context_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"holds a mamba; known .*: llama, qwen2, qwen3"):
        skeleton(tmp_path / "model.gguf")


def test_a_file_that_does_not_say_its_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", made(), say=lambda writer: writer.kv_data[0].pop("general.architecture"))
    for read in (skeleton, load_pretrained, licence_of):
        with pytest.raises(UserError, match=r"model\.gguf has no `general\.architecture` in its metadata"):
            read(path)


@pytest.mark.parametrize("kept", [3, 10, 200, 1000, -1])
def test_a_file_that_is_cut_anywhere_is_refused(kept, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", made())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="fetch it again"):
        load_pretrained(path)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="there is no file"):
        find(tmp_path / "model.gguf")


def test_a_folder_with_such_a_file_alone_is_refused_with_its_name(tmp_path):
    write_gguf(tmp_path / "small.gguf", made())
    with pytest.raises(UserError, match=r"small\.gguf: .*path"):
        load_pretrained(find(tmp_path))


# The tokenizer


@pytest.mark.parametrize("bos", [False, True])
def test_the_tokenizer_of_a_file_is_the_one_that_was_written_there(bos, tmp_path):
    known = tokenizer(bos=bos)
    path = write_gguf(tmp_path / "model.gguf", made(vocab_size=len(known) + 3), tokenizer=known)
    manifest = save_hub_tokenizer(path, tmp_path / "saved", vocab_size=len(known) + 3)
    coder = HFTokenizer(tmp_path / "saved")
    text = f"{story(3)} 12  34\n\nUnseen: żółw {EOS}!"
    assert coder.encode(text) == known(text, split_special_tokens=True)["input_ids"]  # a mark in a text is text
    assert coder.decode(coder.encode(text)) == text
    assert coder.eod == known.eos_token_id
    assert "chat_template.jinja" in manifest["files"]


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ12", "'s"]),
        ("smollm", ["a", "ĠĠ", "1", "2", "'s"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "'s"]),
    ],
)
def test_text_is_cut_by_the_rule_that_the_file_names(pre, parts, tmp_path):
    known = tokenizer(bos=False)
    path = write_gguf(tmp_path / "model.gguf", made(vocab_size=len(known)), tokenizer=known, pre=pre)
    save_hub_tokenizer(path, tmp_path / "saved", vocab_size=len(known))
    backend = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").backend_tokenizer
    assert [part for part, _ in backend.pre_tokenizer.pre_tokenize_str("a  12's")] == parts
    assert (backend.normalizer is not None) == (pre == "qwen2")


def test_every_mark_of_a_file_stays_whole_and_is_no_text(tmp_path):
    known = tokenizer(bos=False)
    known.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    path = write_gguf(tmp_path / "model.gguf", made(vocab_size=len(known)), tokenizer=known)
    save_hub_tokenizer(path, tmp_path / "saved", vocab_size=len(known))
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = saved("sea<|turn|>sun")["input_ids"]
    assert known.convert_tokens_to_ids("<|turn|>") in ids
    assert saved.decode(ids, skip_special_tokens=True) == "seasun"


def test_a_way_of_cutting_text_that_is_not_known_is_refused(tmp_path):
    known = tokenizer(bos=False)
    path = write_gguf(tmp_path / "model.gguf", made(vocab_size=len(known)), tokenizer=known, pre="another")
    with pytest.raises(UserError, match=r"'another'; known: 'gpt2' with 'gpt-2', 'smollm'"):
        save_hub_tokenizer(path, tmp_path / "saved", vocab_size=len(known))


def test_an_end_of_text_that_is_no_id_is_refused(tmp_path, monkeypatch):
    known = tokenizer(bos=False)
    with monkeypatch.context() as patched:
        patched.setattr(type(known), "eos_token_id", 5000, raising=False)
        path = write_gguf(tmp_path / "model.gguf", made(vocab_size=len(known)), tokenizer=known)
    with refused(str(path), "fetch it again"):
        save_hub_tokenizer(path, tmp_path / "saved", vocab_size=len(known))


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", made())
    with pytest.raises(UserError, match="lacks merges, model, token_type, tokens: "):
        save_hub_tokenizer(path, tmp_path / "saved", vocab_size=48)


# The recipe


def test_a_file_is_tapered_scored_and_exported_as_a_folder_is(tmp_path, capsys):
    known = tokenizer(bos=True)
    model = made(vocab_size=len(known), tie_word_embeddings=True)
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer=known)
    write_stories(tmp_path / "train.txt")
    words = ["taper", "--model", str(path), "--data", str(tmp_path / "train.txt"), "--steps", "10", "--threads", "1"]
    words += ["--batch", "2", "--context", "24", "--valid-fraction", "0.2", "--device", "cpu"]
    words += ["--out", str(tmp_path / "run"), "--final", "--form", "normfree"]
    assert main([*words, "--dry-run"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert main(words) == 0
    base = read_json(tmp_path / "run/result.json")["base"]
    assert (base["licence"], base["digest"]) == ("apache-2.0", sha256_of(path))
    exported = tapernorm.load(tmp_path / "run/export")
    assert not has_tied_head(exported)
    folded = fold(load(tmp_path / "run"))[0]
    ids = IDS % len(known)
    assert torch.allclose(logits_of(exported, ids), logits_of(folded, ids), rtol=1e-5, atol=1e-5)
    text = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/export")
    assert text("the cat")["input_ids"] == known("the cat")["input_ids"]
    card = (tmp_path / "run/export/README.md").read_text()
    assert "license: apache-2.0" in card


# The real one


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="SmolLM2 is not there: make smollm2-model")
def test_smollm2_is_read_whole(tmp_path):
    model = skeleton(SMOLLM2)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert has_tied_head(model)
    assert model.config.rope_parameters["rope_theta"] == 100_000.0
    assert licence_of(SMOLLM2) == "apache-2.0"
    manifest = save_hub_tokenizer(SMOLLM2, tmp_path, vocab_size=49_152)
    coder = HFTokenizer(tmp_path)
    assert (manifest["eod"], coder.decode(coder.encode("It's 12  past\n\n9."))) == (2, "It's 12  past\n\n9.")
    pieces = transformers.AutoTokenizer.from_pretrained(tmp_path).tokenize("Hello  12 there")
    assert pieces == ["Hello", "ĠĠ", "1", "2", "Ġthere"]
