"""Fold a finished run: its unfused and fused exports, and the proof that its loss did not move."""

from pathlib import Path
from typing import Any

import torch

from .data.tokens import TokenStream
from .errors import UserError
from .evaluate import evaluate
from .files import read_json, write_json
from .folding import fold
from .models.llama import Decoder
from .models.store import load, save
from .pretrain import require_vocabulary
from .provenance import provenance
from .train import pick_device

SCHEMA_VERSION = 1
FORMS = {"unfused": False, "fused": True}


def fold_run(run: Path, tokens: Path, out: Path, *, device: str, threads: int) -> dict[str, Any]:
    """Fold the tapered model in `run` both ways into `out`/{unfused,fused}, score all three, write `out`/result.json.

    Raises:
        UserError: the run holds no foldable model, or another vocabulary than the token streams.
    """
    if not (run / "result.json").is_file():
        raise UserError(f"{run} holds no result.json: give the run folder of a tapered model")
    trained = read_json(run / "result.json")
    chosen = pick_device(device)
    torch.set_num_threads(threads)
    model = load(run).to(chosen)
    stream = TokenStream.open(tokens, "valid")
    require_vocabulary(model.config.vocab_size, stream, tokens)

    def loss(scored: Decoder) -> dict[str, Any]:
        score = evaluate(
            scored,
            stream.tokens,
            text_bytes=stream.split["bytes"],
            context=model.config.context,
            batch=16,
            device=chosen,
        )
        return {"value": score.ce, "unit": "nats/token"}

    (out / "result.json").unlink(missing_ok=True)  # an earlier one: it vouches for the files beside it
    values, reports = {"valid_ce_gated": loss(model)}, {}
    for form, fused in FORMS.items():
        folded, report = fold(model, fused=fused)
        save(folded, out / form)
        values[f"valid_ce_{form}"] = loss(folded)
        reports[form] = report.as_dict()
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": "fold",
        "job": trained["job"],
        "values": values,
        "reports": reports,
        "provenance": provenance(
            config_hash=trained["provenance"]["config_hash"], device=chosen.type, seed=trained["job"]["seed"]
        ),
    }
    write_json(out / "result.json", result)
    return result
