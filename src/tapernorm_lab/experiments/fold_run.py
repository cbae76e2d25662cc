"""Fold a finished run into its unfused and fused exports, and check that its validation loss stays the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapernorm.architectures import context_of
from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.util.atomic_files import read_json, sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.provenance import provenance

from ..data.token_stream import TokenStream
from ..training.device import take_device
from ..training.outputs import Work, output_folder, require_kind
from ..training.run_folder import require_vocabulary
from ..training.validation_loss import evaluate

SCHEMA_VERSION = 1
FORMS = {"unfused": False, "fused": True}


def fold_run(
    run: Path,
    tokens: Path | None,
    out: Path,
    *,
    forms: Sequence[str] = tuple(FORMS),
    device: str,
    threads: int,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Fold the tapered model in `run` into `out`/{form} for each of `forms`; write and return `out`/result.json.

    With token streams in `tokens`, score the tapered model and each of its forms.

    Raises:
        UserError: the run holds no foldable model, or its vocabulary differs from that of the token streams. `out`
            holds the fold of other weights, and `overwrite` is not set.
    """
    require_kind(out, "fold", overwrite=overwrite)
    if not (run / "result.json").is_file():
        raise UserError(f"{run} holds no result.json: give the run folder of a tapered model")
    trained = read_json(run / "result.json")
    chosen = take_device(device, threads)
    model = load(run).to(chosen)
    stream = None if tokens is None else _open_stream(tokens, model)
    weights = sha256_of(run / "model.safetensors")  # identifies the model that is folded
    work = Work("fold", {"weights_sha256": weights})
    with output_folder(out, work, overwrite=overwrite):
        (out / "result.json").unlink(missing_ok=True)  # it must not stand beside the files of another fold
        values = {} if stream is None else {"valid_ce_gated": _loss(model, stream, chosen)}
        reports = {}
        for form in forms:
            folded, report = fold(model, fused=FORMS[form])
            save(folded, out / form)
            if stream is not None:
                values[f"valid_ce_{form}"] = _loss(folded, stream, chosen)
            reports[form] = report.as_dict()
        result = {
            "schema_version": SCHEMA_VERSION,
            "kind": "fold",
            "weights_sha256": weights,
            "job": trained["job"],
            "values": values,
            "reports": reports,
            "provenance": provenance(
                config_hash=trained["provenance"]["config_hash"],
                device=chosen.type,
                seed=trained["provenance"]["seed"],
            ),
        }
        write_json(out / "result.json", result)
    return result


def _open_stream(tokens: Path, model: nn.Module) -> TokenStream:
    stream = TokenStream.open(tokens, "valid")
    config: Any = model.config
    require_vocabulary(config.vocab_size, stream.manifest, tokens)
    return stream


def _loss(model: nn.Module, stream: TokenStream, device: torch.device) -> dict[str, Any]:
    score = evaluate(
        model,
        stream.tokens,
        text_bytes=stream.split["bytes"],
        context=context_of(model),
        batch=16,
        device=device,
    )
    return {"value": score.ce, "unit": "nats/token"}
