"""A variant: which norms are tapered, and which loss anchors the scale before the head. The paper names five."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

TaperedNorms = Literal["none", "internal", "final", "all"]
Anchor = Literal["none", "absolute", "relative"]  # scale loss: none, (s - s_tgt)^2, ((s - s_tgt)/s_tgt)^2

_STEMS = {
    "none": ("baseline", "Baseline"),
    "internal": ("internal", "Internal-Taper"),
    "final": ("final", "Final-Taper"),
    "all": ("all", "All-Taper"),
}
_ENDINGS = {"none": ("", ""), "absolute": ("_aux", " (+aux)"), "relative": ("_relative", " (+relative aux)")}


@dataclass(frozen=True)
class Variant:
    """The treatment of a model's norms during training; `str` gives its name."""

    taper: TaperedNorms
    anchor: Anchor

    @staticmethod
    def named(name: str) -> "Variant":
        """Return the variant of this name.

        Raises:
            ValueError: there is no such variant.
        """
        if name not in _NAMED:
            raise ValueError(f"there is no variant {name!r}; choose one of {', '.join(_NAMED)}")
        return _NAMED[name]

    @property
    def name(self) -> str:
        """Name in folders, results and on the command line; the paper's name if the paper has the variant."""
        return _STEMS[self.taper][0] + _ENDINGS[self.anchor][0]

    @property
    def label(self) -> str:
        """Name in tables and figures."""
        return _STEMS[self.taper][1] + _ENDINGS[self.anchor][1]

    @property
    def tapers(self) -> bool:
        """Whether any norm is tapered."""
        return self.taper != "none"

    @property
    def internal(self) -> bool:
        """Whether the norms inside the blocks are tapered."""
        return self.taper in ("internal", "all")

    @property
    def final(self) -> bool:
        """Whether the final norm is tapered."""
        return self.taper in ("final", "all")

    @property
    def anchored(self) -> bool:
        """Whether the variant has a scale loss."""
        return self.anchor != "none"

    @property
    def plain(self) -> bool:
        """Whether the variant is the Baseline, which tapers and anchors nothing."""
        return not (self.tapers or self.anchored)

    def __str__(self) -> str:
        return self.name


_EVERY = [Variant(taper, anchor) for taper in get_args(TaperedNorms) for anchor in get_args(Anchor)]
_NAMED = {variant.name: variant for variant in _EVERY}
PAPER_VARIANTS = tuple(Variant.named(name) for name in ("baseline", "internal", "internal_aux", "all", "all_aux"))
VARIANTS = tuple(variant.name for variant in PAPER_VARIANTS)
VARIANT_LABELS = {variant.name: variant.label for variant in PAPER_VARIANTS}


def _read(given: Any) -> Any:
    return Variant.named(given) if isinstance(given, str) else given


def _read_of_paper(given: Any) -> Any:
    if (variant := _read(given)) not in PAPER_VARIANTS:
        raise ValueError(
            f"{given!r} is not one of the paper's variants ({', '.join(VARIANTS)}): make it an arm of a study"
        )
    return variant


_NAME = PlainSerializer(str, return_type=str)
AnyVariant = Annotated[Variant, BeforeValidator(_read), _NAME, WithJsonSchema({"type": "string"})]  # by its name
PaperVariant = Annotated[
    Variant, BeforeValidator(_read_of_paper), _NAME, WithJsonSchema({"enum": list(VARIANTS), "type": "string"})
]
