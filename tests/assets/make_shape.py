"""Writes a GGUF file in the shape of a large model, with random weights: right for speed and memory, meaningless as text.

    python make_shape.py 1b|8b|70b|qwen3-8b|qwen3-30b-a3b|gpt-oss-20b OUT.gguf --vocabulary ggml-vocab-llama-bpe.gguf [--layers N]

The first three are Llama's; for Qwen3's the vocabulary is ggml-vocab-qwen2.gguf. The last two are mixtures of experts, with 8 layers of 48 and
of 24 unless told otherwise, each as wide and with as many experts as in the model. Their routers are random, too: tokens go to all experts nearly alike. gpt-oss has
Llama's vocabulary here, which is smaller than its own.

Formats are those of llama.cpp's Q4_K_M mix (Q6_K for the output head and for half of attn_v and ffn_down, else Q4_K); gpt-oss has experts of
MXFP4, and else Q8_0. The blocks' scales are such that weights have zero mean and a deviation of 1/sqrt(columns), so that activations stay
finite; those of mixtures' embeddings are larger. Deterministic.
"""

import argparse
import math
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
    "qwen3-30b-a3b": QWEN3 | {"architecture": "qwen3moe", "hidden": 2048, "feed_forward": 6144, "layers": 8, "head_dim": 128, "heads": 32,
                              "kv_heads": 4, "experts": 128, "experts_used": 8, "expert_width": 768},
    "gpt-oss-20b": {"architecture": "gpt-oss", "context": 131072, "rope_base": 150000.0, "epsilon": 1e-5, "pre": "llama-bpe", "head_norms": False,
                    "hidden": 2880, "feed_forward": 2880, "layers": 8, "head_dim": 64, "heads": 64, "kv_heads": 8,
                    "experts": 32, "experts_used": 4, "expert_width": 2880, "window": 128},
}
Q4_K, Q6_K, Q8_0 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.Q8_0
MXFP4, F32 = gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.F32
PIECE = 1 << 18  # blocks that are made at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    shape = dict(SHAPES[args.shape])
    shape["layers"] = args.layers or shape["layers"]
    reader = gguf.GGUFReader(args.vocabulary)
    read = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
    tokens = read("tokens")
    writer = gguf.GGUFWriter(args.out, shape["architecture"])
    writer.add_name(f"random weights in the shape of {args.shape}")
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["feed_forward"])
    writer.add_head_count(shape.get("heads", shape["hidden"] // shape["head_dim"]))
    writer.add_head_count_kv(shape.get("kv_heads", KV_HEADS))
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_base"])
    writer.add_layer_norm_rms_eps(shape["epsilon"])
    writer.add_vocab_size(len(tokens))
    if "experts" in shape:
        writer.add_expert_count(shape["experts"])
        writer.add_expert_used_count(shape["experts_used"])
        writer.add_expert_feed_forward_length(shape["expert_width"])
    is_oss = shape["architecture"] == "gpt-oss"
    if is_oss:
        writer.add_sliding_window(shape["window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE if is_oss else gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(read("token_type"))
    writer.add_token_merges(read("merges"))
    writer.add_bos_token_id(read("bos_token_id"))
    writer.add_eos_token_id(read("eos_token_id"))
    tensors = list(tensors_of(shape, len(tokens)))
    for name, dims, kind in tensors:
        of_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row = dims[-1] if kind == F32 else dims[-1] // of_block * block_bytes
        dtype = np.float32 if kind == F32 else np.uint8
        stored = (*dims[:-1], row)
        writer.add_tensor_info(name, stored, np.dtype(dtype), math.prod(stored) * np.dtype(dtype).itemsize, None if kind == F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(SEED)
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    for name, dims, kind in tensors:
        if kind == F32:
            out.write(numbers(name, dims, random).tobytes())
        else:
            left = math.prod(dims) // gguf.GGML_QUANT_SIZES[kind][0]
            while left > 0:
                out.write(blocks(kind, min(left, PIECE), deviation(name, dims, shape), random).tobytes())
                left -= PIECE
        writer.write_padding(out, out.tell())
    writer.close()


def tensors_of(shape: dict, vocabulary: int):
    """Name, dimensions (rows, then columns) and format, in the order of the file."""
    if shape["architecture"] == "gpt-oss":
        yield from gpt_oss_tensors(shape, vocabulary)
        return
    hidden, ffn, layers = shape["hidden"], shape["feed_forward"], shape["layers"]
    head_dim = shape["head_dim"]
    queries, kv = shape.get("heads", hidden // head_dim) * head_dim, shape.get("kv_heads", KV_HEADS) * head_dim
    yield "token_embd.weight", (vocabulary, hidden), Q4_K
    for i in range(layers):
        # llama.cpp: use_more_bits
        more = Q6_K if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else Q4_K
        block = f"blk.{i}."
        yield block + "attn_norm.weight", (hidden,), F32
        if shape["head_norms"]:
            yield block + "attn_q_norm.weight", (head_dim,), F32
            yield block + "attn_k_norm.weight", (head_dim,), F32
        yield block + "attn_q.weight", (queries, hidden), Q4_K
        yield block + "attn_k.weight", (kv, hidden), Q4_K
        yield block + "attn_v.weight", (kv, hidden), more
        yield block + "attn_output.weight", (hidden, queries), Q4_K
        yield block + "ffn_norm.weight", (hidden,), F32
        if "experts" in shape:
            experts, width = shape["experts"], shape["expert_width"]
            yield block + "ffn_gate_inp.weight", (experts, hidden), F32
            yield block + "ffn_gate_exps.weight", (experts, width, hidden), Q4_K
            yield block + "ffn_up_exps.weight", (experts, width, hidden), Q4_K
            yield block + "ffn_down_exps.weight", (experts, hidden, width), more
        else:
            yield block + "ffn_gate.weight", (ffn, hidden), Q4_K
            yield block + "ffn_up.weight", (ffn, hidden), Q4_K
            yield block + "ffn_down.weight", (hidden, ffn), more
    yield "output_norm.weight", (hidden,), F32
    yield "output.weight", (vocabulary, hidden), Q6_K


def gpt_oss_tensors(shape: dict, vocabulary: int):
    hidden, experts, width = shape["hidden"], shape["experts"], shape["expert_width"]
    queries, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    yield "token_embd.weight", (vocabulary, hidden), Q8_0
    for i in range(shape["layers"]):
        block = f"blk.{i}."
        yield block + "attn_norm.weight", (hidden,), F32
        for part, rows, cols in [("attn_q", queries, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden), ("attn_output", hidden, queries)]:
            yield f"{block}{part}.weight", (rows, cols), Q8_0
            yield f"{block}{part}.bias", (rows,), F32
        yield block + "attn_sinks.weight", (shape["heads"],), F32
        yield block + "post_attention_norm.weight", (hidden,), F32
        yield block + "ffn_gate_inp.weight", (experts, hidden), F32
        yield block + "ffn_gate_inp.bias", (experts,), F32
        for part, rows, cols in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)]:
            yield f"{block}ffn_{part}_exps.weight", (experts, rows, cols), MXFP4
            yield f"{block}ffn_{part}_exps.bias", (experts, rows), F32
    yield "output_norm.weight", (hidden,), F32
    yield "output.weight", (vocabulary, hidden), Q8_0


def numbers(name: str, dims: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Floats: norms of ones, biases and sinks of zeros, routers of random numbers."""
    if name.endswith("norm.weight"):
        return np.ones(dims, np.float32)
    if name.endswith("ffn_gate_inp.weight"):
        return (random.standard_normal(dims) / np.sqrt(dims[-1])).astype(np.float32)
    return np.zeros(dims, np.float32)


def deviation(name: str, dims: tuple[int, ...], shape: dict) -> float:
    """Of a matrix's weights. With experts, embeddings are so large that rows stay what their tokens make them: else what attention adds, which is
    much the same for all, chooses the same experts for all."""
    if name == "token_embd.weight" and "experts" in shape:
        return 4.0
    return 1.0 / np.sqrt(dims[-1])


def blocks(kind: gguf.GGMLQuantizationType, count: int, deviation: float, random: np.random.Generator) -> np.ndarray:
    """`count` blocks, as bytes."""
    data = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    if kind == Q4_K:  # d, dmin, 12 bytes of scales and minimums, 128 of nibbles: d * 32 * q - dmin * 32
        d = deviation / (32 * np.sqrt((16**2 - 1) / 12))
        data[:, 0:4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
        data[:, 4:12], data[:, 12:16] = 160, 0
    elif kind == Q6_K:  # 192 bytes of quants, 16 scales, d: d * 32 * (q - 32)
        d = deviation / (32 * np.sqrt((64**2 - 1) / 12))
        data[:, 192:208] = 32
        data[:, 208:210] = np.array([d], np.float16).view(np.uint8)
    elif kind == Q8_0:  # d, 32 signed bytes
        data[:, 0:2] = np.array([deviation / 73.9], np.float16).view(np.uint8)
    else:  # MXFP4: an exponent, 16 bytes of nibbles, each for one of 16 numbers with a mean square of 8.6
        data[:, 0] = round(127 + math.log2(deviation / np.sqrt(8.6)))
    return data


if __name__ == "__main__":
    main()
