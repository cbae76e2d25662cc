"""The tokenizer that belongs to a model of transformers, as a `Coder`: any that comes as one tokenizer.json.

A document is what the tokenizer itself makes of a text, its own beginning-of-text id included; the literal text of a
special token is text. Documents end with the end-of-text id, or with the beginning-of-text id of a tokenizer that has
no other.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapernorm.checkpoints.gguf import is_gguf, tokenizer_of_gguf
from tapernorm.checkpoints.tokenizer_files import TOKENIZER_FILES
from tapernorm.util.atomic_files import (
    read_json,
    sha256_of,
    whole_file,
    write_json,
)
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.provenance import provenance

from .manifest import SCHEMA_VERSION, read_manifest
from .tokenizers import HUB, backend_of

_FILE = "tokenizer.json"
_OPENED = "as_loaded.json"  # what transformers makes of the files: the ids of a run are its
_MARKS = "special_tokens_map.json"
_PROBE = "Hello world"


class HubTokenizer:
    """The tokenizer that `save_hub_tokenizer` wrote into a folder; the interface of `coders.Coder`.

    Raises:
        UserError: the folder holds no such tokenizer, or not the one that its manifest describes.
    """

    manifest: dict[str, Any]
    vocab_size: int  # the model's, which may have ids to spare
    eod: int

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder, "tokenizer")
        path = folder / self.manifest.get("opened", _FILE)
        self._tokenizer = backend_of(path, self.manifest, f"delete {folder} and run it again")
        self.vocab_size = self.manifest["vocab_size"]
        self.eod = self.manifest["eod"]

    def encode(self, text: str) -> list[int]:
        """Ids of one text as the tokenizer marks it, without the end-of-document id at either end."""
        return self._bare(self._tokenizer.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self._bare(encoded.ids) for encoded in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for; special tokens give none."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _bare(self, ids: list[int]) -> list[int]:
        first = 1 if ids and ids[0] == self.eod else 0
        last = len(ids) - 1 if len(ids) > first and ids[-1] == self.eod else len(ids)
        return ids[first:last]


def save_hub_tokenizer(source: Path, out: Path, *, vocab_size: int) -> dict[str, Any]:
    """Write the tokenizer of the model in `source`, a folder or a GGUF file, into `out`; returns its manifest.

    The files of a folder are copied byte for byte, for the export. `HubTokenizer` opens what transformers made of them.

    Args:
        vocab_size: the model's.

    Raises:
        UserError: there is none, it has no tokenizer.json form, its ids are not those of its own file or not the
            model's, or no id can end a document. Nothing half-written is left.
    """
    loaded = _load(source)
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        loaded.save_pretrained(made)
        if not (made / _FILE).is_file():
            raise UserError(f"the tokenizer in {source} has no tokenizer.json: save its fast form there")
        eod = _require_ids(loaded, source, vocab_size)
        files = _files_of(source, made, loaded)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": "tokenizer",
            "vocab_size": vocab_size,
            "model_type": HUB,
            "eod": eod,
            "source": str(source),
            "opened": _OPENED,
            "sha256": sha256_of(files[_OPENED]),
            "files": {name: sha256_of(path) for name, path in files.items()},
            "provenance": provenance(config_hash=digest({"source": str(source)})),
        }
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
    except Exception as error:  # of any type, by what is wrong with the files
        reason = " ".join(str(error).split())[:200]
        remedy = "fetch it again" if is_gguf(source) else "put its tokenizer.json there"
        raise UserError(f"no tokenizer can be read in {source} ({reason}): {remedy}") from error


def _files_of(source: Path, made: Path, loaded: Any) -> dict[str, Path]:
    """Name in the output -> file: the source's own where it has a tokenizer.json, else those that transformers made."""
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
    """The id that ends documents.

    Raises:
        UserError: there is none, an id is not what the files say, or it is none of the model's.
    """
    mark = loaded.eos_token if loaded.eos_token is not None else loaded.bos_token
    if mark is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-text token: name one as eos_token in its tokenizer_config.json"
        )
    ids: dict[str, int] = loaded.get_vocab()
    if _has_own(source):
        _require_told(ids, mark, source)
    elif set(loaded(_PROBE, add_special_tokens=False)["input_ids"]) <= {loaded.unk_token_id}:  # made of no file
        raise UserError(f"no tokenizer in {source}: put its tokenizer.json there")
    if len(ids) > vocab_size:
        raise UserError(f"the tokenizer in {source} has {len(ids)} ids and the model {vocab_size}: they differ")
    if (largest := max([*ids.values(), *loaded("x")["input_ids"]])) >= vocab_size:
        raise UserError(
            f"the tokenizer in {source} has an id {largest} and the model's end at {vocab_size - 1}: there is a hole "
            "in its ids, or it belongs to another model; give the model's own tokenizer.json"
        )
    return ids[mark]


def _require_told(ids: Mapping[str, int], mark: str, source: Path) -> None:
    """Raise UserError where the files tell another id of a token than it has, or none of the mark."""
    from tokenizers import Tokenizer

    path = source / _FILE
    told = {token["content"]: token["id"] for token in read_json(path).get("added_tokens", [])}
    told |= {token["content"]: int(i) for i, token in _settings(source).get("added_tokens_decoder", {}).items()}
    for token, number in told.items():
        if ids.get(token) != number:
            raise UserError(
                f"{path} gives the token {token!r} the id {number}, and it is read as {ids.get(token)}: there is a "
                "hole in its ids; give the model's own tokenizer.json"
            )
    if mark not in told and Tokenizer.from_file(str(path)).token_to_id(mark) is None:
        raise UserError(
            f"{path} has no token {mark!r}, the eos_token or bos_token of its tokenizer_config.json: name one that it "
            "has"
        )


def _has_own(source: Path) -> bool:
    return not is_gguf(source) and (source / _FILE).is_file()


def _settings(source: Path) -> dict[str, Any]:
    path = source / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
