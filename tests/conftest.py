"""Settings that every test shares."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import bitsandbytes.nn.modules
import pytest
import torch
import transformers

import zoo

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# The same arithmetic on every machine: on a CPU with AVX512-BF16, 4-bit layers repack their weights in eval mode, round
# their scales, and fail at the small widths of the tests. What kbitwrap makes of repacked weights is tested by
# repacking them.
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
zoo.checkpoints()  # before other processes are started, so that they share it


@pytest.fixture(scope="module", autouse=True)
def _no_search_for_garbage_in_libraries() -> None:
    """Exclude what is loaded from garbage collection: trainers and meters collect often, and it takes 0.3 s."""
    gc.collect()
    gc.freeze()
