"""What the tests answer, for the table of docs/compatibility.md."""

from collections.abc import Callable

import pytest

from cells import Answer


@pytest.fixture
def answer(record_property: Callable[[str, object], None]) -> Answer:
    """Says what holds in a column of a row. It stands in the page if the test passes."""
    return lambda row, column, text: record_property("compatibility", (row, column, text))
