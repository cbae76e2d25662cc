"""OpenWebText in the split that earlier work on GPT-2 drew, so that its held-out documents stay held out here.

The split is `datasets`' own: 0.05 % of the documents, shuffled with seed 2357, in the order of the data set
(method.md section 11). Training and validation documents come in the split's order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from tapernorm.util.errors import UserError, setting

from .hub import (
    described,
    local_rows,
    parquet_files,
    reaching,
    texts,
)

if TYPE_CHECKING:
    import datasets

HUB_NAME = "Skylion007/openwebtext"
HUB_REVISION = "refs/convert/parquet"  # data only: the data set's main branch was a loading script
DOCUMENTS = 8_013_769  # in the whole data set; the hub converts some data sets in part only
VALID_SHARE, SEED = 0.0005, 2357
_FIELD = "text"
_ROWS = 1000  # rows a batch


@dataclass(frozen=True)
class OpenWebText:
    """The two splits of a data set of documents."""

    valid: "datasets.Dataset"
    train: "datasets.Dataset"
    details: dict[str, Any]

    def documents(self) -> Iterator[tuple[Literal["train", "valid"], str]]:
        """Every document with its split, validation first."""
        for text in texts(self.valid, _FIELD, _ROWS):
            yield "valid", text
        for text in texts(self.train, _FIELD, _ROWS):
            yield "train", text


def openwebtext(files: tuple[str, ...]) -> OpenWebText:
    """From the hub, or from local Parquet files in the order given: the split depends on that order.

    Raises:
        UserError: the hub is out of reach or holds another number of documents, a file cannot be read, or there is no
            text to split.
    """
    if files:
        paths = parquet_files(files)
        rows, details = local_rows(paths, _FIELD), described(paths)
    else:
        rows, details = _hub()
    if _FIELD not in rows.column_names or len(rows) < 2:
        raise UserError(
            f"openwebtext has {len(rows)} rows with columns {', '.join(rows.column_names) or 'none'}; it must have at "
            f"least two, with a column {_FIELD!r}: check {setting('data.files')}"
        )
    parts = rows.train_test_split(test_size=VALID_SHARE, seed=SEED, shuffle=True)
    split = {"valid_share": VALID_SHARE, "seed": SEED, "documents": len(rows)}
    return OpenWebText(parts["test"], parts["train"], {**details, "split": split})


def _hub() -> "tuple[datasets.Dataset, dict[str, Any]]":
    import datasets

    remedy = f"copy its Parquet files from a machine that has one, and name their folder in {setting('data.files')}"
    with reaching(HUB_NAME, remedy):
        rows = cast(datasets.Dataset, datasets.load_dataset(HUB_NAME, split="train", revision=HUB_REVISION))
    if len(rows) != DOCUMENTS:
        raise UserError(
            f"{HUB_NAME} at {HUB_REVISION} has {len(rows)} documents and the whole data set {DOCUMENTS}: another set "
            f"gives another split. Name a folder of the whole set's Parquet files in {setting('data.files')}"
        )
    return rows, {"hub": HUB_NAME, "revision": HUB_REVISION}
