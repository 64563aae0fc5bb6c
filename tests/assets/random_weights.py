"""Rewrites a GGUF file with random blocks of a format for the matrices of one of its layers: for formats into which llama.cpp quantizes only
with measurements of importance, so that products with them can be compared. Nearly meaningless as text.

    python random_weights.py IN.gguf TYPE OUT.gguf

All of a block is random but for its scale, which gives each matrix the root mean square that it had. The other layers stay: with random
ones a small difference in one grows in the next. Deterministic.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from dequantize import rewrite, values_of

SEED = 20261123
LAYER = "blk.2."
Kind = gguf.GGMLQuantizationType


def main() -> None:
    source, kind, out = Path(sys.argv[1]), Kind[sys.argv[2]], Path(sys.argv[3])
    random = np.random.default_rng(SEED)

    def change(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, Kind | None]:
        values = values_of(tensor)
        if not tensor.name.startswith(LAYER) or values.ndim == 1:
            return values, None
        return blocks(kind, values, random), kind

    rewrite(source, out, gguf.LlamaFileType.ALL_F32, change)


def blocks(kind: Kind, values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As many weights as `values`, row by row, as bytes."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    data = random.integers(0, 256, (rows * columns // weights, size), np.uint8)
    set_scale(kind, data, 1.0)
    scale = deviation(values) / deviation(gguf.quants.dequantize(data, kind))
    set_scale(kind, data, scale)
    return data.reshape(rows, -1)


def set_scale(kind: Kind, data: np.ndarray, scale: float) -> None:
    half = np.array([scale], np.float16)
    if kind == Kind.MXFP4:  # a power of two, in the first byte
        data[:, 0] = 128 + round(float(np.log2(scale)))
    elif kind == Kind.IQ1_M:  # the upper four bits of each of the last four words, the lowest first
        words = data[:, 48:56].view(np.uint16)
        for place in range(4):
            words[:, place] = (words[:, place] & 0x0FFF) | ((int(half.view(np.uint16)[0]) >> 4 * place & 0xF) << 12)
    else:
        data[:, 0:2] = half.view(np.uint8)


def deviation(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


if __name__ == "__main__":
    main()
