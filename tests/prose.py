"""The sentences of Markdown pages, without code, tables and headings, and of docstrings."""

import ast
import re
from collections.abc import Iterator

SHORT = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|Prop|Fig|Eq|approx|No)\.$")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ENTRY = re.compile(r"^    (?! )(\w+: )?")
_BLOCKS = re.compile(r"^( *)(```|\$\$).*?^\1\2$|<!--.*?-->", flags=re.MULTILINE | re.DOTALL)
_SKIPPED = re.compile(r"#|\||!!!|!\[|<img|:::|---$|    (?![-*\d ])")  # at the start of a line


def paragraphs(text: str) -> list[str]:
    """Each paragraph, and each item of a list, as one line. A definition in a list counts from its colon on."""
    found: list[list[str]] = [[]]
    indented = False
    for line in _BLOCKS.sub("", text).splitlines():
        if line.startswith("!!!"):
            indented = True
        elif line and not line.startswith(" "):
            indented = False
        body = line[4:] if indented and line.startswith("    ") else line
        item = re.match(r" *([-*+]|\d+\.) +", body)
        if not body.strip() or _SKIPPED.match(body):
            found.append([])
        elif item:
            found.append([body[item.end() :]])
        else:
            found[-1].append(body.strip())
    return [" ".join(lines) for lines in found if lines]


def sentences(text: str) -> list[str]:
    """Every sentence: it ends at . ! or ?, and at a colon that ends a paragraph."""
    found: list[str] = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"`[^`]*`|\$[^$]+\$", "code", plain)  # one word each
        plain = re.sub(r"\[[−\d., ]+\]", "", plain)  # an interval belongs to its number
        kept = ""
        for piece in re.split(r"(?<=[.!?])[\"”)*_]*(?= |$)", plain):
            kept += piece
            if not SHORT.search(kept):
                found.append(kept.strip(" *_"))
                kept = ""
        found.append(kept.strip())
    return [sentence for sentence in found if sentence]


def docstrings(code: str) -> Iterator[tuple[str, str]]:
    """(name, docstring as Markdown) of a module and of all in it; entries of Args, Raises and the like are items."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            lines, in_section = [], False
            for line in text.splitlines():
                if _SECTION.fullmatch(line):
                    in_section, line = True, ""
                elif line and not line.startswith(" "):
                    in_section = False
                lines.append(_ENTRY.sub("- ", line).strip() if in_section else line)
            yield getattr(node, "name", "module"), "\n".join(lines)


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())
