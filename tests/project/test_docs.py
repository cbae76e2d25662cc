"""README, docs and CONTRIBUTING name what there is, in sentences that end."""

import pkgutil
import re

import pytest
from places import ROOT
from prose import docstrings, sentences, words

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
GENERATED = sorted(path for of in ("results", "figures") for path in (ROOT / of / "published").rglob("*.md"))
CODE = sorted(path for of in ("src/tapernorm", "benchmarks") for path in (ROOT / of).rglob("*.py"))
LONGEST = 25  # words of a sentence

CHANGES = ("A new architecture", "A new variant", "A new table", "A new corpus")


def test_contributing_walks_through_four_changes_and_names_what_each_touches():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for title in CHANGES:
        (change,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
        marked = re.findall(r"`([^`\s]+)`", change)
        files = [ROOT / mark for mark in marked if "/" in mark]
        assert len(files) > 2
        assert not [str(file) for file in files if not file.exists()]
        modules = [path for file in files for path in (file.glob("*.py") if file.is_dir() else [file])]
        code = "".join(path.read_text(encoding="utf-8") for path in modules if path.suffix == ".py")
        names = [mark.split(".")[0] for mark in marked if re.fullmatch(r"[A-Za-z_.]+", mark)]
        assert names
        assert not [name for name in names if not re.search(rf"\b{name}\b", code)]


def test_the_map_of_the_house_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(src/[^`]+)/` \|", text, flags=re.MULTILINE))
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "src").glob("*/*/__init__.py")}
    assert named == rooms | {"src/tapernorm"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_modules_and_files_that_exist_in_lines_of_120_columns(page):
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:src|tests|workflow|profiles|config|docs|benchmarks)/[^`\s*{}<>]+)`", text))
    assert not [path for path in paths if not (ROOT / path).exists()]
    for dotted in set(re.findall(r"\btapernorm(?:_lab)?(?:\.[a-zA-Z_]+)+", text)):
        pkgutil.resolve_name(dotted)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in outside.splitlines() if not line.startswith(("|", "    ", "<img", "!["))]
    assert not [line for line in prose if len(line) > 120]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/training-loops.md"], ids=lambda page: page.name)
def test_loops_for_loaded_models_put_them_into_training_mode(page):
    """from_pretrained hands a model over in eval mode, in which nothing is observed."""
    text = page.read_text(encoding="utf-8")
    observed = text.index("with taper.observe()")
    start = text.rindex("attach(model", 0, observed)
    assert "model.train()" in text[start:observed]


@pytest.mark.parametrize("page", [*PAGES, *GENERATED], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_is_longer_than_25_words(page):
    found = sentences(page.read_text(encoding="utf-8"))
    assert [sentence for sentence in found if words(sentence) > LONGEST] == []


@pytest.mark.parametrize("module", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_of_a_docstring_is_longer_than_25_words(module):
    told = docstrings(module.read_text(encoding="utf-8"))
    assert [(name, found) for name, text in told for found in sentences(text) if words(found) > LONGEST] == []


def test_sentences_of_docstrings_are_found_and_counted():
    code = f'''
class Named:
    """Hold two numbers.

        y = {"x " * 30}

    Args:
        first: {"one " * 13}
            {"one " * 13}end.
        second: two words. Another.

    Returns:
        The sum.
    """
'''
    ((name, text),) = docstrings(code)
    assert name == "Named"
    assert [words(found) for found in sentences(text)] == [3, 27, 2, 1, 2]


def test_sentences_are_found_and_counted():
    page = f"# A heading {'word ' * 30}\n\n{'one ' * 26}end.\nTwo `a b` words:\n\n"
    page += f"- item, e.g. this. Another\n\n```sh\n{'x ' * 40}\n```\n"
    found = sentences(page)
    assert [words(sentence) for sentence in found] == [27, 3, 3, 1]
    assert sentences(f"| {'cell ' * 30} |\n\n<!-- {'word ' * 30} -->\n") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page):
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")):
        found = page.parent / target if target else page
        assert found.is_file(), target
        headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"
