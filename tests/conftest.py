"""Settings that every test shares."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
