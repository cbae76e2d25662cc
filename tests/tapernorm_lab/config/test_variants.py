"""Variants: two fields and a name for each pair; jobs and configs take and give the name."""

from itertools import product
from typing import get_args

import pytest

from tapernorm_lab.config.variants import VARIANT_LABELS, VARIANTS, Anchor, TaperedNorms, Variant

FIELDS = {  # the paper's names
    "baseline": ("none", "none"),
    "internal": ("internal", "none"),
    "internal_aux": ("internal", "absolute"),
    "all": ("all", "none"),
    "all_aux": ("all", "absolute"),
}
LABELS = ["Baseline", "Internal-Taper", "Internal-Taper (+aux)", "All-Taper", "All-Taper (+aux)"]


def test_the_papers_names_and_labels_are_its_own():
    assert {name: (Variant.named(name).taper, Variant.named(name).anchor) for name in VARIANTS} == FIELDS
    assert list(VARIANT_LABELS.items()) == list(zip(VARIANTS, LABELS, strict=True))


def test_every_pair_of_fields_has_a_name_of_its_own_that_gives_it_back():
    pairs = list(product(get_args(TaperedNorms), get_args(Anchor)))
    names = [Variant(*pair).name for pair in pairs]
    assert len(set(names)) == len(pairs) == 12
    assert [Variant.named(str(Variant(*pair))) for pair in pairs] == [Variant(*pair) for pair in pairs]
    assert len({Variant(*pair).label for pair in pairs}) == 12
    with pytest.raises(ValueError, match=r"no variant 'internal_aux_'.* baseline_relative"):
        Variant.named("internal_aux_")


def test_what_the_fields_say():
    told = {name: (v.internal, v.final, v.anchored, v.plain) for name in FIELDS if (v := Variant.named(name))}
    assert told == {
        "baseline": (False, False, False, True),
        "internal": (True, False, False, False),
        "internal_aux": (True, False, True, False),
        "all": (True, True, False, False),
        "all_aux": (True, True, True, False),
    }
    assert (Variant("final", "none").internal, Variant("final", "none").final) == (False, True)
    assert not Variant("none", "relative").plain
