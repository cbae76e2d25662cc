"""What a base model says of itself, and odd folders: one line before any weight is read, in the dry run too."""

import json
import re
import shutil

import gguf
import pytest
import torch
from gguf_files import made, write_gguf
from own_models import write_model, write_stories
from safetensors.torch import load_file, save_file
from taper_runs import run_of
from tiny_models import gated
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from tapernorm import export
from tapernorm.architectures import logits_of
from tapernorm.checkpoints import store
from tapernorm.checkpoints.base_config import UnusableWeights
from tapernorm.checkpoints.pretrained import load_pretrained, skeleton
from tapernorm.util.errors import UserError
from tapernorm_lab.models.gpt2 import load_base
from tapernorm_lab.own_model.dry_run import describe
from tapernorm_lab.own_model.options import Request

IDS = torch.arange(6)[None]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name in ("gpt2", "llama"):
        write_model(folder / name, name)
    write_stories(folder / "train.txt")
    return folder


def changed(home, tmp_path, name="gpt2", *, raw=None, **fields):
    """A copy of a base whose config has other fields, or other bytes."""
    folder = tmp_path / "changed"
    shutil.copytree(home / name, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_bytes(json.dumps({**json.loads(path.read_text()), **fields}).encode() if raw is None else raw)
    return folder


def request(home, model, **options):
    base = {"data": (str(home / "train.txt"),), "steps": 20, "out": home / "run", "threads": 1, "device": "cpu"}
    return Request(model=str(model), **base, **options)


def refused_everywhere(home, folder, *words, readers=(skeleton, load_pretrained, load_base)):
    """The run, the dry run and the GPT-2 track refuse `folder` by a message of one line that holds `words`."""
    calls = [lambda read=read: read(folder) for read in readers] + [lambda: describe(run_of(request(home, folder)))]
    for call in calls:
        with pytest.raises(UserError) as refused:
            call()
        said = str(refused.value)
        assert "\n" not in said
        assert all(word in said for word in words), said


# The config


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [{"quant_method": "gptq", "bits": 4}, {}])
def test_quantised_weights_are_refused_by_the_config(home, tmp_path, field, value):
    folder = changed(home, tmp_path, **{field: value})
    (folder / "model.safetensors").unlink()  # no weight is asked for
    refused_everywhere(home, folder, "quantised", field, value.get("quant_method", "unknown"))
    load_base(changed(home, tmp_path, quantization_config=None))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize(
    "kernel", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", "flex_attention", "none", 5]
)
def test_a_kernel_that_is_not_here_gives_way_to_the_models_own_and_changes_nothing(home, tmp_path, key, kernel):
    expected = load_pretrained(home / "gpt2")
    folder = changed(home, tmp_path, **{key: kernel})
    for read in (load_pretrained, load_base):
        model = read(folder)
        assert model.config._attn_implementation == expected.config._attn_implementation == "sdpa"
        assert torch.equal(logits_of(model, IDS), logits_of(expected, IDS))
        told = [{**made.config.to_dict(), "_name_or_path": ""} for made in (model, expected)]
        assert told[0] == told[1]
    assert type(skeleton(folder)) is GPT2LMHeadModel


def test_a_model_that_would_return_tuples_returns_objects(home, tmp_path):
    folder = changed(home, tmp_path, return_dict=False)
    for read in (load_pretrained, load_base):
        assert torch.equal(logits_of(read(folder), IDS), logits_of(load_pretrained(home / "gpt2"), IDS))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_kernel_that_is_here_is_the_one_that_runs(home, tmp_path, kernel):
    folder = changed(home, tmp_path, attn_implementation=kernel)
    assert load_pretrained(folder).config._attn_implementation == kernel
    assert load_base(folder).config._attn_implementation == kernel


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": "GPT2LMHeadModel"}, ("architectures", "list")),
        ({"architectures": 5}, ("architectures", "list")),
        ({"architectures": [5]}, ("holds a 5", "known")),
        ({"architectures": []}, ("none named",)),
        ({"architectures": ["LlamaForCausalLM"]}, ("LlamaForCausalLM", "gpt2", "model_type")),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, ("'own'", "auto_map", "never run")),
        ({"model_type": None}, ("cannot read a config",)),
        ({"dtype": "float99"}, ("float99",)),
        ({"dtype": "auto"}, ("auto",)),
        ({"activation_function": "swish9"}, ("GPT2LMHeadModel", "swish9")),
        ({"n_head": 0}, ("GPT2LMHeadModel", "ZeroDivisionError")),
        ({"n_head": 5}, ("GPT2LMHeadModel", "divisible")),
        ({"n_embd": "wide"}, ("'n_embd' expected int",)),
    ],
)
def test_a_config_that_describes_no_known_model_is_refused_in_one_line(home, tmp_path, fields, words):
    refused_everywhere(home, changed(home, tmp_path, **fields), *words, readers=(skeleton, load_pretrained))


@pytest.mark.parametrize(
    "raw", [b"[]", b"5", b"null", b'"x"', b"{", b"", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"]
)
def test_a_config_that_is_no_json_object_is_named(home, tmp_path, raw):
    folder = changed(home, tmp_path, raw=raw)
    refused_everywhere(home, folder, "config.json", readers=(skeleton, load_pretrained))
    with pytest.raises(UserError):
        load_base(folder)


@pytest.mark.parametrize("fields", [{"dtype": "float16"}, {"torch_dtype": "float99"}, {"dtype": None}])
def test_the_dtype_of_the_file_does_not_matter(home, tmp_path, fields):
    model = load_pretrained(changed(home, tmp_path, **fields))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_reading_a_config_draws_no_random_number(home):
    before = torch.get_rng_state()
    skeleton(home / "llama")
    load_pretrained(home / "llama")
    assert torch.equal(torch.get_rng_state(), before)


# Other folders


def test_what_tapernorm_wrote_is_no_base(home, tmp_path):
    _, model, _ = gated("llama", options={"final": True}, dtype=torch.float32)
    store.save(model, tmp_path / "run")
    export.save(model, tmp_path / "normfree")
    export.save(model, tmp_path / "stock", form="stock")
    for name in ("run", "normfree"):
        readers = (skeleton, load_pretrained)
        refused_everywhere(home, tmp_path / name, "written by tapernorm", readers=readers)
    refused_everywhere(home, tmp_path / "stock", "rms_norm_eps", readers=(skeleton,))
    assert load_pretrained(tmp_path / "stock")  # for its self-check


def test_an_adapter_is_told_to_be_merged(home, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/small"}')
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    refused_everywhere(home, tmp_path, "someone/small", "merge", readers=(skeleton, load_pretrained))
    (tmp_path / "adapter_config.json").write_text("[]")
    refused_everywhere(home, tmp_path, "adapter_config.json", readers=(skeleton, load_pretrained))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_weights_that_only_a_pickle_holds_are_refused_before_anything_is_loaded(home, tmp_path, name):
    folder = changed(home, tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    refused_everywhere(home, folder, name, "safetensors", readers=(skeleton, load_pretrained))
    shutil.copy(home / "gpt2/model.safetensors", folder)
    assert load_pretrained(folder)


# Weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["transformer.h.1.mlp.c_fc.weight", "transformer.wte.weight", "transformer.ln_f.bias"])
def test_a_weight_that_is_not_finite_is_named_before_any_training_and_in_the_dry_run(home, tmp_path, key, value):
    folder = changed(home, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights[key].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused_everywhere(home, folder, key, "1 values of", "not finite", readers=(load_pretrained, load_base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_judged_as_they_are_stored(home, tmp_path, dtype):
    model = AutoModelForCausalLM.from_pretrained(home / "llama", dtype=dtype)
    model.save_pretrained(tmp_path)
    load_pretrained(tmp_path)
    with torch.no_grad():
        model.model.norm.weight[2] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(UnusableWeights, match=r"model\.norm\.weight .* 1 values"):
        load_pretrained(tmp_path)


def test_damaged_weights_or_such_of_another_model_stop_the_dry_run(home, tmp_path):
    folder = changed(home, tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-20])
    refused_everywhere(home, folder, "damaged", readers=(load_pretrained, load_base))
    folder = changed(home, tmp_path, n_inner=24)
    (folder / "model.safetensors").write_bytes(content)
    refused_everywhere(home, folder, "c_fc", readers=(load_pretrained, load_base))


def test_a_gguf_file_is_judged_alike(tmp_path):
    model = made()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = torch.nan
    path = write_gguf(tmp_path / "nan.gguf", model)
    with pytest.raises(UnusableWeights, match=r"layers\.1\.mlp\.up_proj\.weight .* not finite"):
        load_pretrained(path)
    path = write_gguf(tmp_path / "other.gguf", made(), without=("model.norm.weight",))
    with pytest.raises(UnusableWeights, match=re.escape("model.norm.weight")):
        load_pretrained(path)

    def heads(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count")
        writer.add_head_count(0)

    with pytest.raises(UserError, match=r"headless\.gguf"):
        skeleton(write_gguf(tmp_path / "headless.gguf", made(), say=heads))
