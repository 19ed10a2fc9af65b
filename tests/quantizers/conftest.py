"""What the tests answer, for the table of docs/compatibility.md."""

from collections.abc import Callable, Iterator

import pytest
import torch

from cells import CELLS, Answer

if not {"hqq", "torchao"} <= CELLS.keys():  # of another environment, chosen by QUANTIZERS
    collect_ignore = ["test_loading.py", "test_pretrained.py", "test_sentence_transformer.py"]


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """What a library compiles for itself, as BitNet's layers, runs as it is written: compiling takes the longest."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def answer(record_property: Callable[[str, object], None]) -> Answer:
    """Says what holds in a column of a row. It stands in the page if the test passes."""
    return lambda row, column, text: record_property("compatibility", (row, column, text))
