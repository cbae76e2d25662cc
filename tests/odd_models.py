"""A tokenizer, token streams, rows of another text, and small decoders to try on them, with and without norms."""

import json
from pathlib import Path

import builders
import torch
from scored_texts import make_tokenizer, write_corpus

from tapernorm.checkpoints.store import save
from tapernorm.folding import fold
from tapernorm_lab.config.jobs import BlocksJob
from tapernorm_lab.config.odd_inputs import RobustnessJob
from tapernorm_lab.data.blocks import write_blocks
from tapernorm_lab.data.token_stream import TokenStream, write_tokens
from tapernorm_lab.experiments.odd_inputs.rows import never_seen, token_counts

VOCABULARY, CONTEXT, WIDTH = 300, 16, 12
LENGTHS = (20, 28)
POISON = 3e3
STORIES = [f"Story {i}: the {('cat', 'dog', 'owl', 'fox')[i % 4]} ran.\n\nIt hid in {i} holes." for i in range(40)]
CODE = [f"def f{i}(x):\n\treturn x ** {i}  # naïve — “quoted”\n" for i in range(9)]


def job(**changes) -> RobustnessJob:
    odd = {"seed": 0, "max_rows": 1000, "rare_tokens": 9, "repeat": 5, "lengths": LENGTHS, "position_bin": 4}
    data = {"source": "text", "files": ["code.txt"], "field": "text", "part": None, "valid_fraction": 1}
    odd["texts"] = [{"name": "code", "label": "code of Python", "data": [{**data, "max_train_documents": None}]}]
    odd |= {key: changes.pop(key) for key in list(changes) if key in odd}
    whole = {"d_model": WIDTH, "seed": 3, "models": {"baseline": "Baseline", "all": "All-Taper"}, "context": CONTEXT}
    return RobustnessJob.model_validate(json.loads(json.dumps({**whole, "robustness": odd, **changes})))


def make(folder: Path) -> Path:
    """Everything below `folder`: tokenizer, tokens, code (rows), and models baseline, all, and both poisoned.

    Poisoned are the embeddings of all tokens that the training text never has.
    """
    stories = write_corpus(folder / "stories", STORIES)
    tokenizer = make_tokenizer(folder / "tokenizer", stories, VOCABULARY)
    write_tokens(stories, tokenizer, folder / "tokens", CONTEXT)
    cut = BlocksJob(context=CONTEXT + 1, block_documents=None, max_rows=None)
    write_blocks(cut, write_corpus(folder / "texts", CODE), tokenizer, folder / "code")
    shape = {"vocab_size": VOCABULARY, "context": CONTEXT}
    baseline = builders.decoder(**shape)
    tapered, _ = builders.calibrated(model_options=shape, final=True)
    folded, _ = fold(tapered, fused=True)
    counts = token_counts(TokenStream.open(folder / "tokens", "train").tokens, VOCABULARY)
    unseen = never_seen(counts)
    for name, model in {"baseline": baseline, "all": folded}.items():
        save(model.float(), folder / name)
        with torch.no_grad():
            model.get_parameter("model.embed_tokens.weight")[unseen] *= POISON
        save(model, folder / f"{name}_poisoned")
    return folder
