"""Rewrites a GGUF file with every weight as F32, by the gguf package's own formulas: the same weights, nothing rounded.

    python dequantize.py IN.gguf OUT.gguf

Two uses: a reference free of the rounding of activations that kernels for quantized weights do, and a large F32 model. Metadata
and tensors keep their order; decides nothing.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np


def dequantize(source: Path, out: Path) -> None:
    rewrite(source, out, gguf.LlamaFileType.ALL_F32, lambda tensor: (values_of(tensor), None))


def values_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Its weights, row by row."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])


def rewrite(source: Path, out: Path, file_type: gguf.LlamaFileType,
            change: Callable[[gguf.ReaderTensor], tuple[np.ndarray, gguf.GGMLQuantizationType | None]]) -> None:
    """Copies a file with each tensor changed: to numbers, or to the bytes of blocks of a format."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:  # the writer's own
            continue
        value = file_type if name == gguf.Keys.General.FILE_TYPE else field.contents()
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=element)
    for tensor in reader.tensors:
        data, kind = change(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
