"""Verbs for a model of one's own: taper, export."""

import argparse
import sys
from importlib.util import find_spec
from typing import Any, get_args

from tapernorm.util.errors import UserError

from ..config.sections import DataConfig
from .arguments import (
    Verbs,
    device,
    named,
    output,
    path,
    stands_for,
)

_SOURCES = get_args(DataConfig.model_fields["source"].annotation)
_DATA = f"a .txt, .jsonl or .parquet file, a glob, or one of {', '.join(name for name in _SOURCES if name != 'text')}"
_DTYPES = ("float32", "bfloat16", "float16")
_FORMS = ("stock", "normfree")
_PRECISIONS = ("float32", "bf16")
FORM_MISSING = 3  # exit code of a finished run whose export lacks the form that was wanted


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(taper, "taper a transformers model, fold it, score it before and after, and export it")
    made.add_argument("--model", required=True, metavar="PATH_OR_ID", help="folder, .gguf or hub id; never remote code")
    made.add_argument("--data", required=True, nargs="+", metavar="TEXT", help=f"text to train on: {_DATA}")
    made.add_argument("--steps", type=int, required=True, metavar="N", help="optimizer steps, at least 10")
    output(made, "run folder; the export is its export/")
    made.add_argument("--final", action="store_true", help="taper the final norm too (All-Taper)")
    made.add_argument(
        "--sites", nargs="+", metavar="PATTERN", help="taper only the internal norms of these names; default: all"
    )
    made.add_argument(
        "--level",
        dest="level_weight",
        type=float,
        default=0.0,
        metavar="X",
        help="weight of a loss that levels token scales at the norms that go, in place of the scale loss; try 0.2",
    )
    made.add_argument("--keep-norms", action="store_true", help="a control: the same training, every norm kept")
    made.add_argument("--precision", choices=_PRECISIONS, help="bf16: autocast; default: bf16 on a GPU")
    made.add_argument("--form", choices=_FORMS, help="of the export; default: stock where the model has it")
    made.add_argument(
        "--score", nargs="+", default=[], metavar="NAME=TEXT", help="more text to score, never trained on"
    )
    made.add_argument("--field", default="text", metavar="NAME", help="key or column that holds the text")
    made.add_argument("--valid-fraction", type=float, default=0.05, metavar="X", help="of documents, held out by hash")
    made.add_argument("--lr", type=float, metavar="X", help="peak learning rate; default: by the model's size")
    made.add_argument("--batch", type=int, metavar="N", help="rows per step; default: by the model's size")
    made.add_argument("--context", type=int, metavar="N", help="tokens of a row; default: the model's, at most 1024")
    made.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="rows per forward pass: lower it to save memory; part of what --level computes",
    )
    made.add_argument("--seed", type=int, default=1, metavar="S")
    made.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: all")
    made.add_argument(
        "--dry-run", action="store_true", help="check all options, show norms, consumers and settings; train nothing"
    )
    device(made)
    stands_for(made, data__source="--data", data__files="--data", data__field="--field")
    stands_for(made, data__valid_fraction="--valid-fraction", gpt2__context="--context", model__context="--context")
    stands_for(made, hardware__threads="--threads", hardware__micro_batch="--micro-batch")

    made = verbs.add(export, "write a tapered run as a folder that loads anywhere, or check such a folder")
    made.add_argument(
        "--model", type=path, metavar="RUN", help="run folder of `tapernorm taper`, `finetune` or `pretrain`"
    )
    made.add_argument(
        "--form", choices=_FORMS, help="stock: plain transformers, no norm left working; normfree: folded"
    )
    made.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights")
    made.add_argument("--out", type=path, metavar="DIR", help="folder for the export")
    made.add_argument(
        "--check", type=path, metavar="DIR", help="make the self-check of this export; nothing is written"
    )


def taper(arguments: argparse.Namespace) -> int:
    from ..own_model.options import Request, check

    names = ("model", "steps", "out", "final", "field", "valid_fraction", "lr", "batch", "context", "micro_batch")
    names += ("level_weight", "keep_norms", "precision", "overwrite")
    chosen: dict[str, Any] = {name: getattr(arguments, name) for name in (*names, "seed", "form", "device", "threads")}
    chosen["sites"] = tuple(arguments.sites) if arguments.sites else None
    scored = tuple(named(given, "--score", "TEXT") for given in arguments.score)
    request = Request(data=tuple(arguments.data), scored=scored, **chosen)
    texts = check(request)  # before torch is imported
    quiet()
    from ..own_model.resolve import resolve

    if arguments.dry_run:
        from ..own_model.dry_run import outline

        print(outline(resolve(request, texts)))
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
        print(f"tapernorm: not exported as {form}: {reason}", file=sys.stderr)
    if outcome.exported is not None:
        print(f"exported as {outcome.exported} to {arguments.out / 'export'}")
    else:
        print("a control: nothing exported" if arguments.keep_norms else "nothing exported")
    return FORM_MISSING if outcome.failed else 0


def export(arguments: argparse.Namespace) -> None:
    making = (arguments.model, arguments.form, arguments.out)
    if (arguments.check is None) == (None in making) or (arguments.check and any(making)):
        raise UserError("give --model, --form and --out to export, or --check alone")

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
    """The training bar is the only one to show."""
    if find_spec("transformers") is not None:  # a decoder of our own is exported without it
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _shown(statistics: dict[str, Any]) -> str:
    mean, bits = statistics["rows"]["mean"], statistics["bits_per_byte"]
    if mean is None:
        count = statistics["rows"]["nonfinite"]
        return f"not finite in {count} row{'s' if count > 1 else ''}"
    return f"{mean:.4f} nats/token" + ("" if bits is None else f", {bits:.4f} bits/byte")
