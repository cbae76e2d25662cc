"""Generate text from a checkpoint on disk: find its tokenizer, encode the prompt, and stream the continuation."""

from collections.abc import Iterator
from pathlib import Path

import torch

from tapernorm.checkpoints.store import load
from tapernorm.models.decode import Sampling, generate
from tapernorm.models.decoder import Decoder
from tapernorm.models.packed_decoder import PackedDecoder, Weights
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

from ..data.sentencepiece import Tokenizer
from ..training.device import pick_device


def stream_text(
    checkpoint: Path,
    prompt: str,
    *,
    tokenizer: Path | None,
    new_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    device: str,
    compile: bool = False,
    weights: Weights = "stored",
) -> Iterator[str]:
    """Yield the prompt, then its continuation piece by piece, up to the end of the document or of the context.

    Args:
        weights: of the decoder, as in `PackedDecoder`.

    Raises:
        UserError: no tokenizer is found, it does not fit the model, the prompt is no text, a sampling option is out
            of range, prompt and new tokens exceed the model's context, or int8 weights are asked for on a GPU.
    """
    try:
        sampling = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise UserError(str(error)) from None
    coder = Tokenizer(tokenizer or find_tokenizer(checkpoint))
    try:
        ids = coder.encode(prompt) or [coder.eod]  # an empty prompt starts a document
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid UTF-8: give it as text") from None
    chosen = pick_device(device)
    model = load(checkpoint, Decoder).requires_grad_(False).to(chosen)
    if coder.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {coder.vocab_size} pieces and the model {model.config.vocab_size}: "
            "give the one it was trained with, --tokenizer DIR"
        )
    steps = generate(
        PackedDecoder(model, weights=weights),
        torch.tensor([ids], device=chosen),
        new_tokens=new_tokens or max(model.config.context - len(ids), 1),
        sampling=sampling,
        generator=generator(seed, "generate"),
        eod=coder.eod,
        compile=compile,
    )
    yield prompt
    written: list[int] = []
    shown = text = ""
    for drawn in steps:
        written.append(int(drawn))
        text = coder.decode(written)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the last character is still incomplete
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]  # the rest, with a character that stayed incomplete


def find_tokenizer(checkpoint: Path) -> Path:
    """Return the tokenizer of the run that `checkpoint` lies in: data/tokenizer in one of its parent folders.

    Raises:
        UserError: there is no such folder.
    """
    for folder in (checkpoint.resolve(), *checkpoint.resolve().parents):
        if (found := folder / "data" / "tokenizer" / "tokenizer.model").is_file():
            return found.parent
    raise UserError(f"no tokenizer belongs to {checkpoint}: name its folder, --tokenizer DIR")
