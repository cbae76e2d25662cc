"""Export a tapered model as a folder of safetensors, tokenizer files, model card and self-check.

`stock` is an unchanged class of transformers whose norms divide by a constant. It loads without this package.
`normfree` is the folded model, without its tapered norms. It loads with `tapernorm.load`.
"""

import copy
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .architectures import logits_of
from .checkpoints import model_card as modelcard
from .checkpoints import store
from .checkpoints.pretrained import load_pretrained
from .checkpoints.self_check import CARD, FILE, NEW_CARD, FormFailed, SelfCheck, typical_tokens
from .checkpoints.stock_form import disarmed, refuse_dtype
from .checkpoints.tokenizer_files import TOKENIZER_FILES
from .folding import fold, is_folded
from .util.atomic_files import remove_partials, sync_folder, unwritable, write_text
from .util.errors import UserError, one_line

Form = Literal["stock", "normfree"]
FORMS: tuple[Form, ...] = ("stock", "normfree")
_CHECKED = (torch.float32, torch.bfloat16)


_WORSE = 8.0  # an export's distance to float64, in multiples of the folded model's, that rounding may explain


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    form: Form = "normfree",
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    story: modelcard.Story | None = None,
) -> None:
    """Export `model` into `folder`. An error leaves the folder as it was.

    The files of an earlier export in `folder` are replaced. Other files there stay, and so does an edited model card.

    Args:
        model: a tapered model at g = 0. `normfree` also accepts a folded one, fused or not. The model is unchanged.
        folder: a new or empty folder, or one that holds an export.
        form: "normfree", the folded model, or "stock", an unchanged class of transformers.
        dtype: dtype of the saved weights. None keeps the model's own.
        tokenizer: folder from which tokenizer files are copied, or None.
        story: origin, training and losses of the model, for its model card.

    Raises:
        UserError: the model has no such form, or `stock` was requested in float16. The exported model does not compute
            what the folded model computes. The folder holds other files than an export.
    """
    target = Path(folder)
    if form not in FORMS:
        raise UserError(f"unknown form {form!r}; known forms: {', '.join(FORMS)}")
    dtype = dtype or next(model.parameters()).dtype
    if form == "stock":
        refuse_dtype(dtype)
    require_exportable(target)
    with _whole_folder(target) as new:
        if form == "stock":
            _save_stock(disarmed(model).to(dtype), new)
            _require_same(new, fold(model)[0].eval(), dtype)
        else:
            folded = model if is_folded(model) else fold(model)[0]
            store.save(copy.deepcopy(folded).to(dtype), new)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, new)
        loaded = _load(new)
        write_text(new / CARD, modelcard.render(form, loaded, dtype, story))
        SelfCheck.of(new, loaded).write(new)


def _save_stock(stock: Any, folder: Path) -> None:
    try:
        stock.save_pretrained(folder)
    except ValueError as error:  # for instance an inconsistent generation_config
        raise UserError(f"transformers refuses to save this model: {one_line(error)}") from None


def load(folder: str | Path) -> nn.Module:
    """Load the model of an export or of a run folder, in float32 and eval mode. A tapered model has g = 0.

    An export must pass its self-check: the files have their recorded sha256, and fixed tokens give the stored logits.

    Raises:
        UserError: a file is missing, damaged or of an unknown format, or the self-check fails.
    """
    folder = Path(folder)
    return check(folder)[0] if (folder / FILE).is_file() else store.load(folder)


def check(folder: Path) -> tuple[nn.Module, float]:
    """Load the model of an export, and return it with the largest difference between its logits and the stored ones.

    Raises:
        UserError: the self-check fails, or the folder holds no export.
    """
    known = SelfCheck.read(folder)
    known.require_files(folder)
    model = _load(folder)
    return model, known.require_logits(folder, model)


def _load(folder: Path) -> nn.Module:
    return store.load(folder) if store.is_ours(folder) else load_pretrained(folder)


@torch.no_grad()
def _require_same(folder: Path, folded: nn.Module, stored: torch.dtype) -> None:
    """Raise FormFailed if the model in `folder` does not compute what `folded` computes, in float32 or in bfloat16.

    The reference is `folded` in float64. The model's distance to it is compared with that of `folded` in the same
    dtype, its weights rounded to `stored`.
    """
    tokens = typical_tokens(folded)
    exact = _logits(copy.deepcopy(folded).double(), tokens)
    for dtype in _CHECKED:
        rounded = copy.deepcopy(folded).to(stored).to(dtype)
        ours = (_logits(rounded, tokens) - exact).abs().max().item()
        theirs = (_logits(load_pretrained(folder, dtype), tokens) - exact).abs().max().item()
        floor = max(torch.finfo(dtype).eps, torch.finfo(stored).eps) * exact.abs().max().item()
        if not theirs <= _WORSE * (ours + floor):
            raise FormFailed(
                f"the stock form does not compute what the folded model computes in {dtype}: its logits differ by "
                f"{theirs:.3g} from float64, and those of the folded model by {ours:.3g}; use form `normfree`"
            )


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return logits_of(model.eval(), tokens.to(device)).double().cpu()


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.name in TOKENIZER_FILES:
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, folder / path.name)


def remove(folder: Path) -> None:
    """Remove the files of the export in `folder`, if there is one, and the folder if it is empty then."""
    for name in _written(folder):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def require_exportable(folder: Path) -> None:
    """Raise UserError if `folder` holds files but no export, or an export whose list of files is damaged."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} holds files that are not an export: give a new folder, or empty this one")
    SelfCheck.read(folder)


def _written(folder: Path) -> set[str]:
    """Return the names of the files of the export in `folder`. Without an export there are none."""
    return SelfCheck.read(folder).written(folder) if (folder / FILE).is_file() else set()


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `folder`. On success it replaces `folder`, and on an error it is removed.

    Files in `folder` that do not belong to an earlier export are kept.
    """
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{word}") for word in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        yield new
        remove_partials(new)
        if folder.exists():
            _take_along(folder, new)
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
        sync_folder(folder.parent)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _take_along(folder: Path, new: Path) -> None:
    """Copy what does not belong to the earlier export in `folder` into `new`."""
    written = _written(folder)
    for path in (path for path in folder.iterdir() if path.name not in written):
        if path.name == CARD:
            os.replace(new / CARD, new / NEW_CARD)
            print(f"{path} was edited and is kept; the new model card is {NEW_CARD}", file=sys.stderr)
        if (new / path.name).exists():
            raise UserError(f"{path} was not written by an export, and this export needs that name: move the file away")
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=os.link)
        else:
            os.link(path, new / path.name, follow_symlinks=False)
