"""Texts by their settings and in files, a small tokenizer, and models that write a given text after a given prompt."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tapernorm.checkpoints.store import save
from tapernorm.models.decoder import Decoder
from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.rng import generator
from tapernorm_lab.config.jobs import CorpusJob, TokenizerJob
from tapernorm_lab.config.sections import OWN_SPLIT, DataConfig, TokenizerConfig
from tapernorm_lab.data.corpus import build_corpus
from tapernorm_lab.data.sentencepiece import Tokenizer, train_tokenizer

WIDTH = 48


def data_config(source: str, **settings: Any) -> DataConfig:
    """One text; what is not given is null or empty, the fraction one half where the source has no split of its own."""
    rest = {"files": (), "field": None, "part": None, "max_train_documents": None}
    fraction = {"valid_fraction": None if source in OWN_SPLIT else 0.5}
    return DataConfig(**{"source": source, **rest, **fraction, **settings})


def corpus_with(folder: Path, **splits: list[str]) -> Path:
    """A corpus folder written by hand, its hashes real; a split that is not given is empty."""
    folder.mkdir(parents=True)
    entries = {}
    for split in ("train", "valid"):
        texts = splits.get(split, [])
        raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (folder / f"{split}.jsonl").write_bytes(raw)
        size = sum(len(text.encode()) for text in texts)
        entries[split] = {"documents": len(texts), "bytes": size, "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "kind": "corpus", "splits": entries}))
    return folder


def parquet_with(path: Path, **columns: Any) -> Path:
    """A Parquet file of these columns, each a list or an array of pyarrow."""
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def make_tokenizer(run: Path) -> Tokenizer:
    """The tokenizer of a run folder, 320 pieces with all bytes among them."""
    source = run / "prose.txt"
    stories = [f"Story {i}: the {('cat', 'dog', 'owl', 'fox')[i % 4]} ran. It hid." for i in range(60)]
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("\n<|endoftext|>\n".join(stories))
    data = data_config(source="text", files=(str(source),), field="text", valid_fraction=0.1)
    build_corpus(CorpusJob(data=(data,)), run / "data" / "corpus")
    settings = TokenizerConfig(vocab_size=320, model_type="bpe", max_documents=None, literal_u2581="refuse")
    train_tokenizer(TokenizerJob(tokenizer=settings), run / "data" / "corpus", run / "data" / "tokenizer")
    return Tokenizer(run / "data" / "tokenizer")


def make_writer(folder: Path, chain: list[int], *, context: int = 40, vocab_size: int = 320) -> Path:
    """Save a decoder whose likeliest token after chain[i] is chain[i + 1]; ids must not repeat.

    Its blocks add nothing to the embedding, and the head reads each token's successor off it.
    """
    assert len(set(chain)) == len(chain)
    config = DecoderConfig(
        vocab_size=vocab_size,
        d_model=WIDTH,
        n_layer=1,
        n_head=2,
        n_kv_head=1,
        d_ff=8,
        context=context,
        norm="rmsnorm",
        norm_eps=1e-6,
        rope_theta=100.0,
        tie_head=False,
    )
    model = Decoder(config).initialize(generator(0, "tests"))
    with torch.no_grad():
        for layer in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj, model.lm_head):
            layer.weight.zero_()
        for token, successor in pairwise(chain):
            vector = model.model.embed_tokens.weight[token]
            model.lm_head.weight[successor] = vector / vector.norm()
    save(model, folder)
    return folder
