"""A simulated device for a machine without one: ``start("cuda")``, or ``start("sim")``, which no library has heard of.

One in a process. It is built from ``device.cpp`` when it is first needed, which takes a C++ compiler and half a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
KEYS = {"cuda": ["-DSIM_KEY=CUDA", "-DSIM_IS_CUDA"], "sim": ["-DSIM_KEY=PrivateUse1"]}
NAME = "simulated"
# Operations that choose another by the device, one of those that a build for a CPU does not have.
CHOOSING = ["convolution", "convolution_backward"]
NUM_DEVICES = 2
TOTAL_BYTES = 1 << 36


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build(kind: str) -> Path:
    """The library of a device, built for the torch that is installed."""
    folder = Path(tempfile.gettempdir()) / f"kbitwrap-device-{importlib.metadata.version('torch')}"
    library = folder / f"lib{kind}.so"
    if library.exists() and library.stat().st_mtime > SOURCE.stat().st_mtime:
        return library
    found = compiler()
    if found is None:
        raise SystemExit("a simulated device needs a C++ compiler: found none, neither g++ nor $CXX")
    folder.mkdir(exist_ok=True)
    torch = _torch_folder()
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", *KEYS[kind]]
    part = library.with_suffix(f".{os.getpid()}")
    subprocess.run([found, *options, *headers, str(SOURCE), "-o", str(part), *libraries], check=True)
    part.replace(library)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def start(kind: str) -> None:
    """Make the device; for ``"cuda"`` before anything imports torch, which asks once whether there is CUDA."""
    library = build(kind)
    if kind == "cuda":
        assert "torch" not in sys.modules
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch

    if kind == "cuda":  # libraries ask for CUDA when they are imported, and would load kernels for it
        import accelerate  # noqa: F401
        import bitsandbytes  # noqa: F401
        import peft  # noqa: F401
        import transformers  # noqa: F401
    faulthandler.enable()
    torch.ops.load_library(str(library))
    key = "CUDA" if kind == "cuda" else "PrivateUse1"
    torch.ops.simdev.as_on_cpu([*_beside_composites(torch, key), *CHOOSING])
    api = _api(torch)
    if kind == "sim":
        torch.utils.rename_privateuse1_backend(kind)
        module = types.ModuleType(f"torch.{kind}")
        vars(module).update(api)
        torch._register_device_module(kind, module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    else:
        _give_cuda(torch, api)


def _beside_composites(torch: Any, key: str) -> list[str]:
    """The operations with a kernel for the CPU beside one for any backend; no views, which are the device's own."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composites = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    schemas = {(schema.name, schema.overload_name): schema for schema in torch._C._jit_get_all_schemas()}
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        schema = schemas.get((name, overload))
        if schema is None or not full.startswith("aten::") or has(full, key) or not has(full, "CPU"):
            continue
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if not is_view and any(has(full, composite) for composite in composites):
            found.append(full.removeprefix("aten::"))
    return found


class _Generator:
    def __init__(self, ops: Any, index: int) -> None:
        self._ops, self._index = ops, index

    def get_state(self) -> Any:
        return self._ops.get_state(self._index).clone()

    def set_state(self, state: Any) -> None:
        self._ops.set_state(state, self._index)

    def manual_seed(self, seed: int) -> None:
        self._ops.seed(seed, self._index)


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = record_event = wait_stream


def _api(torch: Any) -> dict[str, Any]:
    """What libraries ask a device's module for."""
    ops = torch.ops.simdev
    generators = tuple(_Generator(ops, number) for number in range(NUM_DEVICES))

    def index(device: Any = None) -> int:
        if device is None:
            return int(ops.current_device())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(ops.current_device()) if found is None else int(found)

    def allocated(device: Any = None) -> int:
        return int(ops.allocated(index(device))[0])

    def most_allocated(device: Any = None) -> int:
        return int(ops.allocated(index(device))[1])

    def set_states(states: Any) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    @contextlib.contextmanager
    def device_context(device: Any = None) -> Iterator[None]:
        before = ops.current_device()
        ops.set_device(index(device))
        try:
            yield
        finally:
            ops.set_device(before)

    seed_all(0)
    properties = types.SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=1, gcnArchName="", uuid=NAME
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_initialized": True,
        "init": lambda: None,
        "device": device_context,
        "device_count": lambda: NUM_DEVICES,
        "current_device": ops.current_device,
        "set_device": lambda device: ops.set_device(index(device)),
        "synchronize": lambda device=None: None,
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": most_allocated,
        "max_memory_reserved": most_allocated,
        "reset_peak_memory_stats": lambda device=None: ops.reset_peak(index(device)),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": allocated(device),
            "allocated_bytes.all.peak": most_allocated(device),
            "reserved_bytes.all.current": allocated(device),
        },
        "mem_get_info": lambda device=None: (TOTAL_BYTES, TOTAL_BYTES),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "default_generators": generators,
        "get_rng_state": lambda device=None: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index(device)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_states,
        "manual_seed": lambda seed: generators[index()].manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }


def _give_cuda(torch: Any, api: dict[str, Any]) -> None:
    """Put the device's functions in place of those of a CPU build's ``torch.cuda``."""
    for name, value in api.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda index=0: 0
    clone = torch.UntypedStorage.clone

    def cloned(storage: Any) -> Any:  # a CPU build makes no storage of CUDA's from Python
        if storage.device.type != "cuda":
            return clone(storage)
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage).clone().untyped_storage()

    torch.UntypedStorage.clone = cloned
