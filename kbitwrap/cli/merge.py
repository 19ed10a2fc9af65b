"""``kbitwrap merge``: a saved adapter, merged into the base that it was trained on."""

from __future__ import annotations

import argparse
import os

from .console import EXIT_DONE, add_command, add_destination, write


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "merge",
        run,
        summary="merge a saved adapter into the base that it was trained on, in half precision",
        description="Load BASE quantized as it was in training, merge the adapter that PEFT saved in ADAPTER into its "
        "exactly dequantized weights, and write the half-precision model with its tokenizer, one tensor at a time. The "
        "manifest of the run, kbitwrap.json in ADAPTER or --manifest, says how BASE was quantized, and is compared "
        "with it. A GPU and a CPU may quantize a last bit differently: merge on the type of device that was trained "
        "on. Exit status: 0 written, 1 BASE is not the one that the manifest records, 2 bad usage, bad input, or it "
        "cannot be written; unless it is 0, nothing is left at DST.",
    )
    parser.add_argument("base", metavar="BASE", help="a folder, or a name on the hub")
    parser.add_argument("adapter", metavar="ADAPTER", help="the folder of a saved adapter")
    add_destination(parser)
    parser.add_argument("--manifest", metavar="M", help="the manifest of the run (default: ADAPTER/kbitwrap.json)")
    parser.add_argument(
        "--quant",
        choices=("nf4", "int8", "none"),
        help="how BASE was quantized in training, where neither its config nor a manifest says it",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        help="dtype of the tensors that were not quantized (default: what the manifest or the config of BASE names)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a file (default: %(default)s)"
    )
    parser.add_argument("--device", help="device to merge on (default: cuda if there is one, else cpu)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that BASE brings along")


def run(arguments: argparse.Namespace) -> int:
    """Merge, and print what was written. Of several processes that torchrun starts, the first one does it.

    Args:
        arguments: The parsed options.

    Returns:
        0 if it was written, 1 if the base is not the one that the manifest records.

    Raises:
        InputError: There is no usable base, adapter, manifest or destination.
    """
    if os.environ.get("RANK", "0") != "0":
        return EXIT_DONE
    from .. import merge_checkpoint
    from .loading import choose_device
    from .plan import quantization_config

    device = choose_device(arguments.device)
    quantization = None if arguments.quant is None else quantization_config(arguments.quant, arguments.dtype) or False
    return write(
        arguments,
        lambda: merge_checkpoint(
            arguments.base,
            arguments.adapter,
            arguments.out,
            manifest=arguments.manifest,
            quantization_config=quantization,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            overwrite=arguments.overwrite,
            progress=True,
            device=device,
            trust_remote_code=arguments.trust_remote_code,
        ),
    )
