"""A small corpus and its tokenizer, for models that are scored."""

import json

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm_lab.config.jobs import TokenizerJob
from tapernorm_lab.config.sections import TokenizerConfig
from tapernorm_lab.data.sentencepiece import train_tokenizer


def write_corpus(folder, texts):
    """The same documents in both splits."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    splits = {}
    for split in ("train", "valid"):
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        size = sum(len(text.encode()) for text in texts)
        splits[split] = {"documents": len(texts), "bytes": size, "sha256": sha256_of(folder / f"{split}.jsonl")}
    write_json(folder / "manifest.json", {"schema_version": 1, "kind": "corpus", "splits": splits})
    return folder


def make_tokenizer(folder, corpus, vocab_size=300):
    settings = {"vocab_size": vocab_size, "model_type": "bpe", "max_documents": None, "literal_u2581": "refuse"}
    train_tokenizer(TokenizerJob(tokenizer=TokenizerConfig(**settings)), corpus, folder)
    return folder
