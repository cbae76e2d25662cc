"""Hooks of mkdocs: README.md is the home page, published tables and figures are shown, equations become MathML."""

import html
import re
import textwrap
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "figures/published"
# A link to a published file, on a line of its own. Where the pages are read as they stand it is what it says.
_TABLE = re.compile(r"^( *)\[[^]]*\]\(\.\./(results/published/[\w/]+\.md)\)$", flags=re.MULTILINE)
_FIGURE = re.compile(r"^( *)!\[([^]]*)\]\(\.\./figures/published/([\w/]+)\.png\)$", flags=re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)


def filled(markdown: str) -> str:
    """`markdown` with published tables in place of links to them, and captions beneath published figures."""
    text = _TABLE.sub(lambda link: textwrap.indent((ROOT / link[2]).read_text(encoding="utf-8"), link[1]), markdown)
    return _FIGURE.sub(_figure, text)


def _figure(link: re.Match[str]) -> str:
    caption = FIGURES / f"{link[3]}.md"
    said = f"\n\n{link[1]}{caption.read_text(encoding='utf-8').strip()}" if caption.is_file() else ""
    return f"{link[1]}![{link[2]}](figures/{link[3]}.png){said}"


def home() -> str:
    """README.md with its links turned to the pages of the site; those to files of the checkout become names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](figures/published/", "](figures/")
    return re.sub(r"\[(\w+\.(?:md|cff))\]\(\1\)", r"`\1`", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the home page and the published pictures, which lie outside docs/."""
    files.append(File.generated(config, "index.md", content=home()))
    for path in sorted(FIGURES.glob("*/*.png")):
        name = path.relative_to(FIGURES).as_posix()
        files.append(File.generated(config, f"figures/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Equations, which arithmatex has marked, as MathML."""
    return _MATH.sub(lambda found: mathml(html.unescape(found[3]), block=found[2] == "["), content)


def mathml(latex: str, *, block: bool) -> str:
    return convert(latex.strip(), display="block" if block else "inline")
