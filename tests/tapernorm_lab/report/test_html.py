"""A page is whole HTML: every cell, header, note and picture in its place, nothing of them taken for markup."""

import re
from base64 import b64decode
from html.parser import HTMLParser

from tapernorm_lab.report import html
from tapernorm_lab.report.table import ABSENT, Column, Table

COLUMNS = [Column("size", align="l"), Column("loss", "one"), Column("gap %", "one"), Column("text", code=True)]
ROWS = [["<b>1M</b>", "1.5", "−0.2", "a  b"], ["3M & more", ABSENT, "", ABSENT]]


def made(**changes):
    fields = {
        "name": "table9",
        "columns": COLUMNS,
        "rows": ROWS,
        "published": [["theirs", "1", "2", ABSENT]],
        "caption": "loss < 2 & “more”",
        "notes": ["first <note>", "second"],
        "records": [],
    }
    return html.page(Table(**fields | changes))


class Cells(HTMLParser):
    """The texts of all tags of a kind, and whether every tag that was opened was closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.balanced = {}, [], True
        self.feed(text)
        self.balanced &= not self.open

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
            self.found.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        self.balanced &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data):
        for tag in self.open:
            self.found[tag][-1] += data


def test_every_cell_header_and_note_is_there_as_written():
    parsed = Cells(made())
    assert parsed.balanced
    assert parsed.found["td"] == [cell for row in [*ROWS, ["theirs", "1", "2", ABSENT]] for cell in row]
    assert parsed.found["th"] == ["", "one", "", "size", "loss", "gap %", "text"]
    assert parsed.found["li"] == ["first <note>", "second"]
    assert parsed.found["p"] == ["loss < 2 & “more”"]
    assert parsed.found["code"] == ["a  b"]
    assert "b" not in parsed.found


def test_groups_span_their_columns_and_are_left_out_where_there_are_none():
    assert '<th colspan="2" class="group">one</th>' in made()
    assert "colspan" not in made(columns=[Column(c.header) for c in COLUMNS])


def test_published_rows_are_set_apart():
    assert '<tbody class="published">' in made()
    assert "published" not in made(published=[]).split("</style>")[1]


def test_a_figures_page_holds_its_picture_above_its_caption(tmp_path):
    (tmp_path / "figure9.png").write_bytes(b"\x89PNG of a figure")
    html.write_figure("loss < 2 & “more”", tmp_path / "figure9")
    text = (tmp_path / "figure9.html").read_text(encoding="utf-8")
    found = re.search(r'<img alt="figure9" src="data:image/png;base64,([^"]+)">', text)
    assert found is not None
    assert b64decode(found[1]) == b"\x89PNG of a figure"
    assert "<p>loss &lt; 2 &amp; “more”</p>" in text[found.end() :]


def test_the_page_asks_for_nothing_from_elsewhere_and_styles_nothing_else(tmp_path):
    html.write(Table("t", COLUMNS, ROWS, [], "c", [], []), tmp_path)
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert not [word for word in ("src=", "href=", "url(", "@import", "<script", "http") if word in text]
    rules = text.partition("<style>")[2].partition("</style>")[0].strip().splitlines()
    assert rules
    assert all(".tapernorm" in rule for rule in rules)  # it also stands in another page
