"""The verbs for a model of the user's own: taper, export."""

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from ..own_model.options import OPTIONS, Request, check, option_of
from .arguments import Verbs, named, require_options, stands_for

FORM_MISSING = 3  # exit code of a finished run whose export failed in one form


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    table = dict(OPTIONS.values())
    table["--dry-run"] = "check all options; print norms, the linear maps behind them, and settings; train nothing"
    made = verbs.add(taper, "taper a Hugging Face model, fold it, score it before and after, and export it", table)
    stands_for(made, data__source="--data", data__files="--data", data__field="--field", hardware__device="--device")
    stands_for(made, data__valid_fraction="--valid-fraction", gpt2__context="--context", model__context="--context")
    stands_for(made, hardware__threads="--threads", hardware__micro_batch="--micro-batch")
    table = {
        "--model DIR": "run folder of `tapernorm taper`, `finetune` or `pretrain`",
        "--form stock|normfree": "stock: loads in plain transformers, its norms idle; normfree: folded, without norms",
        "--dtype float32|bfloat16|float16:float32": "number format of the weights",
        "--out DIR": "folder to write the export into",
        "--check DIR": "folder of an export: compare its logits with the recorded ones; write nothing",
    }
    verbs.add(export, "export a tapered run as a folder that can be loaded by itself, or check such a folder", table)


def taper(arguments: argparse.Namespace) -> int:
    given = {field: getattr(arguments, option_of(field)[2:].replace("-", "_")) for field in OPTIONS}
    chosen: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    chosen |= {field: tuple(chosen[field]) for field in ("data", "sites") if field in chosen}
    chosen["scored"] = tuple(named(words, "--score", "TEXT") for words in chosen.get("scored", ()))
    request = Request(**chosen)
    texts = check(request)  # before torch is imported
    quiet()
    from ..own_model.resolve import resolve

    if arguments.dry_run:
        from ..own_model.dry_run import describe

        print(describe(resolve(request, texts)))
        return 0
    from tapernorm.checkpoints.model_card import worse_than_guessing

    from ..own_model.own_text import seen_in_training
    from ..own_model.taper_own_model import taper_model
    from ..training.gpu_slots import device_slot

    with device_slot(arguments.device, 1):
        outcome = taper_model(resolve(request, texts))
    seen = seen_in_training(arguments.out)
    for corpus, forms in outcome.scores.items():
        before, after = (_shown(forms[form]) for form in ("before", "after"))
        told = " (seen in training)" if corpus in seen else ""
        print(f"{corpus}{told}: before {before}; after {after}")
    for line in worse_than_guessing(outcome.scores):
        print(line)
    for form, reason in outcome.failed.items():
        print(f"tapernorm: the export as {form} failed: {reason}", file=sys.stderr)
    if outcome.exported is not None:
        print(f"exported as {outcome.exported} to {arguments.out / 'export'}")
    else:
        print(f"nothing exported{': --keep-norms trains a control' if arguments.keep_norms else ''}")
    return FORM_MISSING if outcome.failed else 0


def export(arguments: argparse.Namespace) -> None:
    making = ("model", "form", "out")
    if arguments.check is None:
        require_options(arguments, "an export", needs=making, of=making)
    else:
        require_options(arguments, "--check", of=making)
    quiet()
    if arguments.check is not None:
        from tapernorm.export import check

        _, difference = check(arguments.check)
        print(f"{arguments.check}: self-check passed, logits within {difference:.2g}")
        return

    import torch

    from tapernorm.checkpoints.stock_form import refuse_dtype

    dtype = getattr(torch, arguments.dtype)
    if arguments.form == "stock":
        refuse_dtype(dtype)
    from ..own_model.export_run import export_run

    export_run(arguments.model, arguments.out, form=arguments.form, dtype=dtype)
    print(f"exported to {arguments.out}")


def quiet() -> None:
    """Switch off the progress bars of transformers, so that only the one of the training shows."""
    if find_spec("transformers") is not None:  # the export of a `Decoder` works without it
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _shown(statistics: dict[str, Any]) -> str:
    mean, bits = statistics["rows"]["mean"], statistics["bits_per_byte"]
    if mean is None:
        count = statistics["rows"]["nonfinite"]
        return f"not finite in {count} row{'s' if count > 1 else ''}"
    return f"{mean:.4f} nats/token" + ("" if bits is None else f", {bits:.4f} bits/byte")
