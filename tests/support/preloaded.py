"""What new processes of the tests need, imported once by the server that they are forked from."""

import gc
import importlib
import pkgutil

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import kbitwrap
from support import settings, trainers, training  # noqa: F401

for _module in pkgutil.walk_packages(kbitwrap.__path__, "kbitwrap."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
gc.freeze()
