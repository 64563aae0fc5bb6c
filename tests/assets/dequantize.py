"""Rewrites a GGUF file with every weight as F32, by the gguf package's own formulas: the same weights, nothing rounded.

    python dequantize.py IN.gguf OUT.gguf

Two uses: a reference free of the rounding of activations that kernels for quantized weights do, and a large F32 model. Metadata
and tensors keep their order; decides nothing.
"""

import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

AT_ONCE = 4096  # weights of a row, as dequantize takes them
Kind = gguf.GGUFValueType


def dequantize(source: Path, out: Path) -> None:
    rewrite(source, out, gguf.LlamaFileType.ALL_F32, lambda tensor: (values_of(tensor), None))


def values_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Its weights, row by row. The package takes sixteen rows at a time, and for short ones its calls of NumPy take ten times as long as the
    numbers do. A format is one of blocks, so rows may be of any number of them."""
    data, kind = tensor.data, tensor.tensor_type
    if data.dtype == np.uint8:  # F32 and F16 are numbers already
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        data = data.reshape(-1, max(data.shape[-1], math.gcd(data.size, AT_ONCE // weights * size)))
    return gguf.quants.dequantize(data, kind).reshape([int(n) for n in reversed(tensor.shape)])


def rewrite(source: Path, out: Path, file_type: gguf.LlamaFileType,
            change: Callable[[gguf.ReaderTensor], tuple[np.ndarray, gguf.GGMLQuantizationType | None]]) -> None:
    """Copies a file with each tensor changed: to numbers, or to the bytes of blocks of a format."""
    reader = Reader(source)
    writer = Writer(out, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:  # the writer's own
            continue
        kind = field.types[0]
        value = file_type if name == gguf.Keys.General.FILE_TYPE else field.parts[-1] if kind == Kind.ARRAY else field.contents()
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        data, kind = change(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Reader(gguf.GGUFReader):
    """Leaves arrays as they are, one piece of bytes: the package makes several objects of each entry, which takes seconds for a vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[np.ndarray], list[int], list[Kind]]:
        if raw_type != Kind.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        head = "<IQ"  # type and number of the entries
        raw_kind, count = struct.unpack_from(head, self.data, orig_offs)
        size, kind = struct.calcsize(head), Kind(raw_kind)
        if kind == Kind.STRING:
            for _ in range(count):
                size += 8 + struct.unpack_from("<Q", self.data, orig_offs + size)[0]
        elif kind in self.gguf_scalar_to_np:
            size += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        else:
            sys.exit(f"the metadata have an array of {kind.name}, which this script does not read")
        return size, [self.data[orig_offs : orig_offs + size]], [0], [Kind.ARRAY]


class Writer(gguf.GGUFWriter):
    """Takes arrays as Reader leaves them."""

    def _pack_val(self, val: object, vtype: Kind, add_vtype: bool, sub_type: Kind | None = None) -> bytes:
        if vtype != Kind.ARRAY:
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        return self._pack("I", vtype) + val.tobytes()


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
