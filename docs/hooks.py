"""Hooks of mkdocs: the home page is README.md, marks become published tables and figures, equations become MathML."""

import html
import re
import textwrap
from pathlib import Path
from typing import Any

import generate
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "figures/published"
_MARK = re.compile(r"^( *)\{\{ (\w+)(?: (\S+))? \}\}$", flags=re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)


def figure(name: str) -> str:
    """`run/figure`: the picture, and its caption where one lies beside it."""
    caption = FIGURES / f"{name}.md"
    said = f"\n{caption.read_text(encoding='utf-8').strip()}\n" if caption.is_file() else ""
    return f"![{name}](figures/{name}.png)\n{said}"


MAKERS = {
    "table": generate.published_table,
    "figure": figure,
    "bench": generate.bench,
    "assumptions": generate.assumptions,
    "artifact": generate.artifact,
    "costs": generate.costs,
}


def filled(markdown: str) -> str:
    """`markdown` with each `{{ maker name }}` on a line of its own replaced by what it makes."""
    return _MARK.sub(lambda mark: textwrap.indent(MAKERS[mark[2]](mark[3] or ""), mark[1]), markdown)


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
