"""Writes a GGUF file in the shape of a large model, with random weights: right for speed and memory, meaningless as text.

    python make_shape.py 1b|8b|70b|qwen3-8b OUT.gguf --vocabulary ggml-vocab-llama-bpe.gguf

The first three are Llama's; for Qwen3's the vocabulary is ggml-vocab-qwen2.gguf.

Formats are those of llama.cpp's Q4_K_M mix (Q6_K for the output head and for half of attn_v and ffn_down, else Q4_K). The blocks'
scales are such that weights have zero mean and a deviation of 1/sqrt(columns), so that activations stay finite. Deterministic.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

SEED = 20251117
KV_HEADS = 8
LLAMA = {"architecture": "llama", "context": 8192, "rope_base": 500000.0, "epsilon": 1e-5, "pre": "llama-bpe", "head_norms": False}
QWEN3 = {"architecture": "qwen3", "context": 40960, "rope_base": 1000000.0, "epsilon": 1e-6, "pre": "qwen2", "head_norms": True}
SHAPES = {
    "1b": LLAMA | {"hidden": 2048, "feed_forward": 8192, "layers": 16, "head_dim": 64},
    "8b": LLAMA | {"hidden": 4096, "feed_forward": 14336, "layers": 32, "head_dim": 128},
    "70b": LLAMA | {"hidden": 8192, "feed_forward": 28672, "layers": 80, "head_dim": 128},
    "qwen3-8b": QWEN3 | {"hidden": 4096, "feed_forward": 12288, "layers": 36, "head_dim": 128},
}
Q4_K, Q6_K, F32 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.F32
BLOCK = 256  # weights
PIECE = 1 << 18  # blocks that are made at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", type=Path, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    reader = gguf.GGUFReader(args.vocabulary)
    read = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
    tokens = read("tokens")
    writer = gguf.GGUFWriter(args.out, shape["architecture"])
    writer.add_name(f"random weights in the shape of {args.shape}")
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["feed_forward"])
    writer.add_head_count(shape["hidden"] // shape["head_dim"])
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_base"])
    writer.add_layer_norm_rms_eps(shape["epsilon"])
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(read("token_type"))
    writer.add_token_merges(read("merges"))
    writer.add_bos_token_id(read("bos_token_id"))
    writer.add_eos_token_id(read("eos_token_id"))
    tensors = list(tensors_of(shape, len(tokens)))
    for name, rows, cols, kind in tensors:
        shape_ = (cols,) if rows == 1 else (rows, cols // BLOCK * block_bytes(kind))
        dtype = np.float32 if kind == F32 else np.uint8
        count = cols * 4 if kind == F32 else rows * shape_[1]
        writer.add_tensor_info(name, shape_, np.dtype(dtype), count, None if kind == F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(SEED)
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    for name, rows, cols, kind in tensors:
        if kind == F32:
            out.write(np.ones(cols, np.float32).tobytes())
        else:
            left = rows * cols // BLOCK
            while left > 0:
                out.write(blocks(kind, min(left, PIECE), cols, random).tobytes())
                left -= PIECE
        writer.write_padding(out, out.tell())
    writer.close()


def tensors_of(shape: dict[str, int], vocabulary: int):
    """Name, rows, columns and format, in the order of the file."""
    hidden, ffn, layers = shape["hidden"], shape["feed_forward"], shape["layers"]
    kv = KV_HEADS * shape["head_dim"]
    yield "token_embd.weight", vocabulary, hidden, Q4_K
    for i in range(layers):
        # llama.cpp: use_more_bits
        more = Q6_K if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else Q4_K
        block = f"blk.{i}."
        yield block + "attn_norm.weight", 1, hidden, F32
        if shape["head_norms"]:
            yield block + "attn_q_norm.weight", 1, shape["head_dim"], F32
            yield block + "attn_k_norm.weight", 1, shape["head_dim"], F32
        yield block + "attn_q.weight", hidden, hidden, Q4_K
        yield block + "attn_k.weight", kv, hidden, Q4_K
        yield block + "attn_v.weight", kv, hidden, more
        yield block + "attn_output.weight", hidden, hidden, Q4_K
        yield block + "ffn_norm.weight", 1, hidden, F32
        yield block + "ffn_gate.weight", ffn, hidden, Q4_K
        yield block + "ffn_up.weight", ffn, hidden, Q4_K
        yield block + "ffn_down.weight", hidden, ffn, more
    yield "output_norm.weight", 1, hidden, F32
    yield "output.weight", vocabulary, hidden, Q6_K


def block_bytes(kind: gguf.GGMLQuantizationType) -> int:
    return gguf.GGML_QUANT_SIZES[kind][1]


def blocks(kind: gguf.GGMLQuantizationType, count: int, cols: int, random: np.random.Generator) -> np.ndarray:
    """`count` blocks of 256 weights each, as bytes."""
    data = random.integers(0, 256, (count, block_bytes(kind)), np.uint8)
    if kind == Q4_K:  # d, dmin, 12 bytes of scales and minimums, 128 of nibbles: d * 32 * q - dmin * 32
        d = 1.0 / np.sqrt(cols) / (32 * np.sqrt((16**2 - 1) / 12))
        data[:, 0:4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
        data[:, 4:12], data[:, 12:16] = 160, 0
    else:  # 192 bytes of quants, 16 scales, d: d * 32 * (q - 32)
        d = 1.0 / np.sqrt(cols) / (32 * np.sqrt((64**2 - 1) / 12))
        data[:, 192:208] = 32
        data[:, 208:210] = np.array([d], np.float16).view(np.uint8)
    return data


if __name__ == "__main__":
    main()
