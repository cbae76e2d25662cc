"""Tokenizers in the tokenizer.json format, each a `Coder`: a model's own, and GPT-2's published byte-level BPE.

A document is the tokenizer's output for a text, including its beginning-of-text id. It ends with the end-of-text id, or
with the beginning-of-text id if the tokenizer has no other. The literal text of a special token is encoded as text, so
that a document cannot contain the end of a document.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapernorm.checkpoints.gguf import is_gguf, tokenizer_of_gguf
from tapernorm.checkpoints.tokenizer_files import TOKENIZER_FILES
from tapernorm.util.atomic_files import read_json, sha256_of, whole_file, write_json
from tapernorm.util.errors import UserError, one_line
from tapernorm.util.hashing import digest

from ..config.jobs import BpeJob
from .manifest import GPT2_BPE, HUB, made_manifest, read_manifest
from .sentencepiece import EOD

_FILE = "tokenizer.json"
_OPENED = "as_loaded.json"  # the tokenizer as transformers loads it from the files; a run uses its ids
_MARKS = "special_tokens_map.json"
_HOLE = "its ids have a gap, or it belongs to another model; give the model's own tokenizer.json"
_PROBE = "Hello world"
GPT2_VOCAB_SIZE = 50_257
_GPT2_IDS = [15496, 995]  # GPT-2's ids of the probe
_ODD = " \t\r\n\n  \x00\x85\u2028naïve 中 👩‍👩‍👧 e\u0301 \u2581" + EOD + " don't"


class HFTokenizer:
    """The tokenizer that `save_hub_tokenizer` or `save_bpe` wrote into a folder, with the interface of `Coder`.

    It encodes the whole text: truncation and padding that are saved in the file are switched off.
    """

    manifest: dict[str, Any]
    vocab_size: int  # the model's vocabulary size, which may exceed the number of ids
    eod: int

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.manifest = read_manifest(folder, "tokenizer")
        path = folder / self.manifest.get("opened", _FILE)
        remedy = f"delete {folder} and run its job again"
        if not path.is_file() or sha256_of(path) != self.manifest["sha256"]:
            raise UserError(f"{path} is missing or differs from its manifest; {remedy}")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises no other type
            raise UserError(f"{path} is no tokenizer ({error}); {remedy}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the literal text of a special token is text
        self.vocab_size = self.manifest["vocab_size"]
        self.eod = self.manifest["eod"]

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text with the tokenizer's special tokens, but no end-of-document id at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self._bare(encoded.ids) for encoded in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens give no text; an incomplete character gives U+FFFD.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(f"ids range from {min(ids)} to {max(ids)}; the vocabulary ends at {self.vocab_size - 1}")
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _bare(self, ids: list[int]) -> list[int]:
        first = 1 if ids and ids[0] == self.eod else 0
        last = len(ids) - 1 if len(ids) > first and ids[-1] == self.eod else len(ids)
        return ids[first:last]


def save_hub_tokenizer(source: Path, out: Path, *, vocab_size: int) -> dict[str, Any]:
    """Write the tokenizer of the model in `source`, a folder or a GGUF file, into `out`, and return its manifest.

    The files of a folder are copied byte for byte, for the export. `HFTokenizer` opens the form that transformers
    made of them.

    Args:
        source: folder or GGUF file of the model.
        out: folder that is written.
        vocab_size: vocabulary size of the model.

    Raises:
        UserError: there is no tokenizer, its ids differ from its file's or the model's, or no id ends a document.
    """
    loaded = _load(source)
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        loaded.save_pretrained(made)
        if not (made / _FILE).is_file():
            raise UserError(f"the tokenizer in {source} has no tokenizer.json: save its fast form there")
        eod = _require_ids(loaded, source, vocab_size)
        files = _files_of(source, made, loaded)
        said = {"vocab_size": vocab_size, "model_type": HUB, "eod": eod, "source": str(source), "opened": _OPENED}
        return _write(out, files, digest({"source": str(source)}), **said)


def _write(out: Path, files: Mapping[str, Path], config_hash: str, **says: Any) -> dict[str, Any]:
    """Copy the files into `out` under their names, and write the manifest."""
    hashes = {name: sha256_of(path) for name, path in files.items()}
    opened = hashes[says.get("opened", _FILE)]
    manifest = made_manifest("tokenizer", config_hash=config_hash, **says, sha256=opened, files=hashes)
    for name, path in files.items():
        with whole_file(out / name) as copy:
            copy.write_bytes(path.read_bytes())
    write_json(out / "manifest.json", manifest)
    return manifest


def _load(source: Path) -> Any:
    try:
        if is_gguf(source):
            return tokenizer_of_gguf(source)
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        loaded(_PROBE)
        return loaded
    except UserError:
        raise
    except Exception as error:  # transformers raises many types, depending on the fault of the files
        remedy = "fetch it again" if is_gguf(source) else "put its tokenizer.json there"
        raise UserError(f"no tokenizer can be read in {source} ({one_line(error)}): {remedy}") from error


def _files_of(source: Path, made: Path, loaded: Any) -> dict[str, Path]:
    """Map names in the output to files: the source's own if it has a tokenizer.json, else those of transformers."""
    if not _has_own(source):
        found = {str(path.relative_to(made)): path for path in made.rglob("*") if path.is_file()}
    else:
        named = [source / name for name in TOKENIZER_FILES]
        paths = [p for path in named for p in (sorted(path.iterdir()) if path.is_dir() else [path]) if p.is_file()]
        found = {str(path.relative_to(source)): path for path in paths}
        if _MARKS not in found and "tokenizer_class" not in _settings(source):  # they follow from the model's class
            (made / _MARKS).write_text(json.dumps(loaded.special_tokens_map), encoding="utf-8")
            found[_MARKS] = made / _MARKS
    return {**dict(sorted(found.items())), _OPENED: made / _FILE}


def _require_ids(loaded: Any, source: Path, vocab_size: int) -> int:
    """Check the ids of a tokenizer against its file and the model, and return the id that ends documents."""
    mark = loaded.eos_token if loaded.eos_token is not None else loaded.bos_token
    if mark is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-text token: name one as eos_token in its tokenizer_config.json"
        )
    ids: dict[str, int] = loaded.get_vocab()
    if _has_own(source):
        _require_told(ids, mark, source)
    elif set(loaded(_PROBE, add_special_tokens=False)["input_ids"]) <= {
        loaded.unk_token_id
    }:  # transformers found no file
        raise UserError(f"no tokenizer in {source}: put its tokenizer.json there")
    if len(ids) > vocab_size:
        raise UserError(
            f"the tokenizer in {source} has {len(ids)} ids, but the model has {vocab_size}: give the model's own"
        )
    if (largest := max([*ids.values(), *loaded("x")["input_ids"]])) >= vocab_size:
        raise UserError(
            f"the tokenizer in {source} has the id {largest}, but the model's ids end at {vocab_size - 1}: {_HOLE}"
        )
    return ids[mark]


def _require_told(ids: Mapping[str, int], mark: str, source: Path) -> None:
    """Check that tokens have the ids that the files give them, and that the files have a token `mark`.

    Raises:
        UserError: an id differs, or the token is missing.
    """
    from tokenizers import Tokenizer

    path = source / _FILE
    told = {token["content"]: token["id"] for token in read_json(path).get("added_tokens", [])}
    told |= {token["content"]: int(i) for i, token in _settings(source).get("added_tokens_decoder", {}).items()}
    for token, number in told.items():
        if ids.get(token) != number:
            raise UserError(
                f"{path} gives the token {token!r} the id {number}, but it is read as {ids.get(token)}: {_HOLE}"
            )
    if mark not in told and Tokenizer.from_file(str(path)).token_to_id(mark) is None:
        raise UserError(f"{path} has no token {mark!r}, its eos_token or bos_token: name one that it has")


def _has_own(source: Path) -> bool:
    return not is_gguf(source) and (source / _FILE).is_file()


def _settings(source: Path) -> dict[str, Any]:
    path = source / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def save_bpe(job: BpeJob, out: Path) -> dict[str, Any]:
    """Write the published GPT-2 tokenizer that `job` names, a hub name or a folder, into `out`; return its manifest.

    It is loaded by name or folder, because transformers makes a tokenizer without a vocabulary from its two file names.

    Raises:
        UserError: the tokenizer cannot be loaded, or is not GPT-2's.
    """
    from transformers import GPT2Tokenizer

    try:
        loaded = GPT2Tokenizer.from_pretrained(job.source)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load the tokenizer {job.source!r} ({error}). Without a network, copy its folder (vocab.json and "
            "merges.txt, or tokenizer.json) from a machine that has one, and name that folder in gpt2.bpe"
        ) from error
    if len(loaded) != GPT2_VOCAB_SIZE:
        raise UserError(
            f"the tokenizer {job.source!r} has {len(loaded)} entries, but GPT-2's has {GPT2_VOCAB_SIZE}: name GPT-2's "
            "in gpt2.bpe, with vocab.json and merges.txt in its folder"
        )
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "made"
        loaded.save_pretrained(made)
        files = {path.name: path for path in sorted(made.iterdir()) if path.is_file()}
        eod = loaded.convert_tokens_to_ids(EOD)
        said = {"vocab_size": GPT2_VOCAB_SIZE, "model_type": GPT2_BPE, "eod": eod, "source": job.source}
        _write(Path(name) / "checked", files, digest(job), **said)
        _require_gpt2(HFTokenizer(Path(name) / "checked"), job.source)
        return _write(out, files, digest(job), **said)


def _require_gpt2(coder: HFTokenizer, source: str) -> None:
    ids, odd = coder.encode(_PROBE), coder.encode(_ODD)
    if coder.eod != GPT2_VOCAB_SIZE - 1 or ids != _GPT2_IDS or coder.decode(odd) != _ODD or coder.eod in odd:
        raise UserError(
            f"the tokenizer {source!r} of gpt2.bpe is not GPT-2's. {_PROBE!r} gives {ids} instead of {_GPT2_IDS}, "
            f"{EOD} has id {coder.eod} instead of {GPT2_VOCAB_SIZE - 1}, or {_ODD!r} decodes to {coder.decode(odd)!r}"
        )
