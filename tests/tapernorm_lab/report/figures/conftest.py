"""The rows that all tests of figures share."""

import figure_rows
import pytest


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    return figure_rows.rows(tmp_path_factory.mktemp("rows"))
