"""Export a tapered model as a folder that loads anywhere and can prove that it is whole.

stock     a class of transformers as it stands, its norms disarmed (`stock`): loads without any of our code
normfree  the folded model: its tapered norms are gone; loads with `tapernorm.load`

Either holds safetensors, the tokenizer's files where there are any, a model card and a self-check.
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


_WORSE = 8.0  # an export may lie this much further from float64 than the folded model does: both only round


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    form: Form = "normfree",
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    story: modelcard.Story | None = None,
) -> None:
    """Export `model` into `folder`, all of it or nothing.

    Of an earlier export there, its own files are replaced. What others put beside them stays, an edited model card too.

    Args:
        model: tapered, its gate at 0; `normfree` takes a folded one too, fused or not. It stays as it is.
        dtype: of the weights; None: the model's own.
        tokenizer: folder whose tokenizer files go along.
        story: what the model card tells of the model's making.

    Raises:
        UserError: the model has no such form, float16 was asked of `stock`, what was written does not compute what the
            folded model does, or the folder holds anything but an export.
    """
    target = Path(folder)
    if form not in FORMS:
        raise UserError(f"unknown form {form!r}; there are {' and '.join(FORMS)}")
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
    except ValueError as error:  # a generation_config that contradicts itself
        raise UserError(f"transformers does not save this model: {one_line(error)}") from None


def load(folder: str | Path) -> nn.Module:
    """The model of an export or of a run folder, in float32 and eval mode; a tapered one at g = 0.

    An export's self-check is made: its files are those that were exported, and its fixed tokens give the stored logits.

    Raises:
        UserError: a file is missing or damaged (of an export, by the name of its self-check), or of an unknown kind.
    """
    folder = Path(folder)
    return check(folder)[0] if (folder / FILE).is_file() else store.load(folder)


def check(folder: Path) -> tuple[nn.Module, float]:
    """The model of an export, and the largest difference of its logits from the stored ones.

    Raises:
        UserError: its self-check fails, or it is no export.
    """
    known = SelfCheck.read(folder)
    known.require_files(folder)
    model = _load(folder)
    return model, known.require_logits(folder, model)


def _load(folder: Path) -> nn.Module:
    return store.load(folder) if store.is_ours(folder) else load_pretrained(folder)


@torch.no_grad()
def _require_same(folder: Path, folded: nn.Module, stored: torch.dtype) -> None:
    """Raise FormFailed where what stands in `folder` is not the folded model, run in float32 or in bf16.

    It is judged by its distance to the folded model in float64, beside that of the folded model when its weights, too,
    are rounded to `stored`.
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
                f"the stock form is not the folded model in {dtype}: its logits lie {theirs:.3g} from float64 and the "
                f"folded model's {ours:.3g}; export it as `normfree`"
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
    """Remove the export in `folder`, if there is one: its own files, and the folder where nothing else is in it."""
    for name in _written(folder):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def require_exportable(folder: Path) -> None:
    """Raise UserError where `folder` holds files and no export, or an export whose list of files is damaged."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} holds files and no export: name a new folder, or empty this one")
    SelfCheck.read(folder)


def _written(folder: Path) -> set[str]:
    """Names of the files of the export in `folder`; none where there is no export."""
    return SelfCheck.read(folder).written(folder) if (folder / FILE).is_file() else set()


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `folder`; on success it becomes `folder`, on any error it is removed.

    What others put beside an earlier export stays: their files go along.
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
    """Put what is not of the earlier export in `folder` into `new` as well."""
    written = _written(folder)
    for path in (path for path in folder.iterdir() if path.name not in written):
        if path.name == CARD:
            os.replace(new / CARD, new / NEW_CARD)
            print(f"{path} was edited and stays; the new model card is {NEW_CARD}", file=sys.stderr)
        if (new / path.name).exists():
            raise UserError(f"{path} was not written by an export, and this one has a file of that name: move it away")
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=os.link)
        else:
            os.link(path, new / path.name, follow_symlinks=False)
