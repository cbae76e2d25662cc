"""The files of a table: every digit in the CSV, every cell in Markdown and LaTeX, and no text taken for markup."""

import math
import re
from dataclasses import replace

import pandas as pd

from tapernorm_lab.report import table
from tapernorm_lab.report.table import Column, Table

HOSTILE = r"100 % of \x{y} & #1 ~ ^ $z$ a_b < > |"
COLUMNS = [Column("size", align="l"), Column("loss", "one | x"), Column("gap %", "one | x"), Column("read", code=True)]
TABLE = Table(
    name="table9",
    columns=COLUMNS,
    rows=[["1M|", "3.1 ± 0.2", "−0.5 [−1.0, 0.1]", r'\x00"é|'], ["2M†", "—", "—", "—"], ["", "1", "2", "a``b"]],
    published=[["theirs", "—", "0.7–1.5", ""]],
    caption=f"Run r: {HOSTILE}",
    notes=[HOSTILE, "second"],
    records=[{"loss": 0.1 + 0.2, "gap": -1 / 3, "seeds": "1 2"}, {"loss": math.nan, "gap": None, "n": 2}],
)


def test_the_csv_keeps_every_digit_and_every_column(tmp_path):
    table.write(TABLE, tmp_path, ["csv"])
    back = pd.read_csv(tmp_path / "table9.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["table9.csv"]
    assert back.columns.tolist() == ["loss", "gap", "seeds", "n"]
    assert back.iloc[0][["loss", "gap", "seeds"]].tolist() == [0.1 + 0.2, -1 / 3, "1 2"]
    assert back.iloc[1].isna().tolist() == [True, True, True, False]


def test_markdown_holds_caption_rows_code_and_notes():
    lines = table.markdown(TABLE).splitlines()
    assert lines[0] == TABLE.caption
    assert lines[-2:] == [f"- {note}" for note in TABLE.notes]
    grid = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    assert len({sum(map(len, line)) for line in grid}) == 1  # padded alike
    cells = [[cell.strip() for cell in line] for line in grid]
    assert cells[0] == ["size", r"one \| x: loss", r"one \| x: gap %", "read"]
    assert cells[2] == [r"1M\|", "3.1 ± 0.2", "−0.5 [−1.0, 0.1]", r'`\x00"é\|`']
    assert [line[3] for line in cells[3:]] == ["—", "``` a``b ```", ""]
    assert cells[-1][0] == "theirs"


def test_latex_is_balanced_escaped_and_every_row_has_every_column():
    text = table.latex(TABLE)
    assert re.findall(r"\\begin{([^}]+)}", text) == ["table*", "tabular", "minipage"]
    assert re.findall(r"\\end{([^}]+)}", text) == ["tabular", "minipage", "table*"]
    assert r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%" in text  # it never leaves the page
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert r"100 \% of \textbackslash{}x\{y\} \& \#1 \textasciitilde{} \textasciicircum{} \$z\$ a\_b" in text
    assert r"$-$0.5 {[}$-$1.0, 0.1{]}" in text
    assert r"\texttt{\textbackslash{}x00" in text
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    spans = [sum(int(n) - 1 for n in re.findall(r"multicolumn{(\d)}", row)) for row in rows]
    assert [len(re.findall(r"(?<!\\)&", row)) + span for row, span in zip(rows, spans, strict=True)] == [3] * 6
    assert text.count("\\midrule") == 3  # under the header, between the groups, and before others' numbers


def test_a_table_taller_than_a_page_becomes_floats_cut_between_groups():
    rows = [[size if line == 0 else "", f"{size} {line}", "1", ""] for size in "abc" for line in range(20)]
    text = table.latex(replace(TABLE, rows=rows))
    floats = text.split("\\begin{table*}")[1:]
    assert [len(re.findall(r"^[abc]? & [abc] \d+ ", page, flags=re.MULTILINE)) for page in floats] == [40, 20]
    assert [page.count("second\\par") for page in floats] == [0, 1]  # notes beneath the last
    assert [page.count("theirs") for page in floats] == [0, 1]
    assert text.count("\\label{") == 1
    assert [page.count("\\addtocounter{table}{-1}") for page in floats] == [0, 1]  # both parts bear one number
    alone = [["x", f"{line}", "1", ""] for line in range(100)]  # no groups to cut between
    pages = table.latex(replace(TABLE, rows=alone)).split("\\begin{table*}")[1:]
    assert max(len(re.findall(r"^x & ", page, flags=re.MULTILINE)) for page in pages) == table.PAGE_ROWS


def test_a_group_taller_than_a_page_names_itself_on_each():
    rows = [["a" if line == 0 else "", f"{line}", "1", ""] for line in range(table.PAGE_ROWS + 5)]
    whole = table.latex(replace(TABLE, rows=rows)).split("\\begin{table*}")[1:]
    assert [len(re.findall(r"^a?(?: &|&) \d+ ", page, flags=re.MULTILINE)) for page in whole] == [table.PAGE_ROWS, 5]
    assert [len(re.findall(r"^a & ", page, flags=re.MULTILINE)) for page in whole] == [1, 1]


def test_rows_of_several_lines_take_as_much_of_a_page():
    said = "word " * 30  # 150 characters
    columns = [replace(column, align="l") if i == 1 else column for i, column in enumerate(COLUMNS)]
    rows = [["x", said, "1", ""] for _ in range(20)]
    pages = table.latex(replace(TABLE, columns=columns, rows=rows)).split("\\begin{table*}")[1:]
    lines = math.ceil(150 / table.PARAGRAPH_LINE)
    assert [page.count("x & ") for page in pages] == [table.PAGE_ROWS // lines, table.PAGE_ROWS // lines, 2]


def test_latex_sets_sentences_in_paragraphs():
    said = [["1M", "a sentence of more than sixty characters, which would make its line wider than a page", "1", ""]]
    columns = [replace(column, align="l") if i == 1 else column for i, column in enumerate(COLUMNS)]
    assert "{@{}" + "lp{5cm}r" in table.latex(replace(TABLE, columns=columns, rows=said))
