"""stories260K as an ordinary folder of transformers: its weights and config, and a tokenizer made of its pieces.

    python tests/stories260k.py models/stories260K work/stories260k

The model was trained on stories that begin with `<s>` and a space, and saw no end-of-text mark; so `<s>` is what
separates documents, and the tokenizer has no `eos_token`.
"""

import json
import shutil
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = 1, 2


def pieces_of(source: Path) -> tuple[list[str], list[float]]:
    """Pieces and their scores; the two marks under their usual names."""
    raw = json.loads((source / "pieces.json").read_text(encoding="utf-8"))
    return [piece.strip("\n") if i in (BOS, EOS) else piece for i, piece in enumerate(raw["pieces"])], raw["scores"]


def tokenizer_of(pieces: list[str], scores: list[float]) -> Tokenizer:
    """A BPE that joins what SentencePiece joins: the adjacent pair whose joined piece has the highest score."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    ways = [(p[:cut], p[cut:]) for p in sorted(ids, key=lambda p: -scores[ids[p]]) for cut in range(1, len(p))]
    merges = [(left, right) for left, right in ways if left in ids and right in ids and ids[left + right] > 258]
    made = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Prepend(" ")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def write_folder(source: Path, out: Path) -> Path:
    """Make the folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, out / name)
    made = tokenizer_of(*pieces_of(source))
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>").save_pretrained(out)
    return out


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
