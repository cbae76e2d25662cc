"""A user's model in a folder of transformers, with a tokenizer of its own, and a text."""

from pathlib import Path

import torch
import transformers
from tiny_models import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 300
SPARE = 12  # ids of the model that its tokenizer does not use
EOS, BOS = "<|end|>", "<|start|>"
_TEXT = "the cat sat on a mat and saw the dog who ran to the old tree by the sea in the sun"
CARD = "---\nlicense: 'mit'\ntags: [x]\n---\n# A model\n"


def story(i: int, words: int = 40) -> str:
    """A document; each number gives another one."""
    known = _TEXT.split()
    draw = torch.Generator().manual_seed(i)
    return " ".join(known[int(k)] for k in torch.randint(len(known), (words,), generator=draw)) + f" {i}."


def write_stories(path: Path, count: int = 60, *, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n<|endoftext|>\n".join(story(first + i) for i in range(count)), encoding="utf-8")
    return path


def tokenizer(*, bos: bool, eos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE; with `bos` every text begins with a mark, as a LLaMA's does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [EOS, BOS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([story(i) for i in range(30)], trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
        )
    marks = ({"eos_token": EOS} if eos else {}) | ({"bos_token": BOS} if bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=made, **marks)


def write_model(folder: Path, name: str = "gpt2", **overrides) -> transformers.PreTrainedModel:
    """The folder of a random model of `tiny_models`, its weights shrunk to a sane start, and its tokenizer."""
    made = tokenizer(bos=name != "gpt2")
    model = tiny(name, dtype=torch.float32, vocab_size=len(made) + SPARE, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.3)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return model
