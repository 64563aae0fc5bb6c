"""Writes GGUF files that no package carries: stories15M from its llama2.c checkpoint, and re-expressions of it.

    python make_models.py RECIPE OUT.gguf --checkpoint FILE --vocabulary ggml-vocab-llama-spm.gguf

Recipes (all F32; the trained weights stay in every one of them):

  llama        as trained: width 288, 6 layers, 6 heads of 48, tied output head
  wide         the same function at width 512 with 16 heads (ten of them zero), so that every row is a multiple of
               256 and every K-quant applies; an untied output head; 8,192 of the 32,000 tokens
  others       llama with the parts of another family, named as its architecture: see FAMILIES. What is new in them (biases, norms,
               divisors) is seeded, windows are of 8 positions, and the original context of stretched rotations is 64, so that all of it shows
               in a text of 256 tokens. `qwen2-zero` has zero biases: it computes what `llama` computes.

Decides nothing about quantization (quantize.py does). Deterministic: the same inputs give the same bytes.
"""

import argparse
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np

SEED = 20240917
HEADER = struct.Struct("<7i")  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
EPSILON = 1e-5  # llama2.c's RMS norm
WIDE = 512  # width of the wide re-expression
WIDE_HEADS = 16  # 16 heads of 48 make 768 columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, required=True)
    args = parser.parse_args()
    model = Checkpoint(args.checkpoint)
    vocabulary = read_vocabulary(args.vocabulary)
    if len(vocabulary["tokens"]) != model.vocabulary:
        sys.exit(f"{args.vocabulary.name} has {len(vocabulary['tokens'])} tokens, the checkpoint {model.vocabulary}")
    RECIPES[args.recipe](model, vocabulary, args.out)


class Checkpoint:
    """A llama2.c checkpoint (version 0): a header of seven integers, then float32 matrices, outputs x inputs."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        self.dim, self.hidden, self.layers, self.heads, self.kv_heads, self.vocabulary, self.context = HEADER.unpack_from(data)
        if self.vocabulary < 0:
            sys.exit(f"{path.name}: expected a tied output head (positive vocabulary size), found {self.vocabulary}")
        self.head_dim = self.dim // self.heads
        values, self._at = np.frombuffer(data, "<f4", offset=HEADER.size), 0

        def take(*shape: int) -> np.ndarray:
            count = int(np.prod(shape))
            self._at += count
            return values[self._at - count : self._at].reshape(shape)

        layers, dim, hidden, kv = self.layers, self.dim, self.hidden, self.kv_heads * self.head_dim
        self.embedding = take(self.vocabulary, dim)
        self.attention_norm = take(layers, dim)
        self.q, self.k, self.v, self.o = take(layers, dim, dim), take(layers, kv, dim), take(layers, kv, dim), take(layers, dim, dim)
        self.ffn_norm = take(layers, dim)
        self.gate, self.down, self.up = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
        self.output_norm = take(dim)
        take(2, self.context, self.head_dim // 2)  # llama2.c's table of sines, which GGUF has no use for
        if self._at != len(values):
            sys.exit(f"{path.name}: expected {self._at} weights after the header, found {len(values)}")


def read_vocabulary(path: Path) -> dict:
    reader = gguf.GGUFReader(path)
    read = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
    return {"tokens": read("tokens"), "scores": read("scores"), "types": read("token_type")}


def start(out: Path, architecture: str, name: str, model: Checkpoint, vocabulary: dict, *, width: int, heads: int, kv_heads: int,
          epsilon: float, keys: dict | None = None) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_name(name)
    writer.add_license("mit")
    writer.add_context_length(model.context)
    writer.add_embedding_length(width)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if heads * model.head_dim != width:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_vocab_size(len(vocabulary["tokens"]))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in ({"rope.dimension_count": model.head_dim, "rope.freq_base": 10000.0} | (keys or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_scores(vocabulary["scores"])
    writer.add_token_types(vocabulary["types"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))


@dataclass
class Family:
    """What sets a family's files apart from llama's. Numbers of vectors are a mean and a deviation, seeded."""

    architecture: str
    keys: dict = field(default_factory=dict)
    halves: bool = False  # rotates (i, i + n/2)
    biases: dict = field(default_factory=dict)  # by projection
    norms: dict = field(default_factory=dict)  # of a layer, beside llama's: length, mean, deviation
    pre_norms: bool = True
    fused_qkv: bool = False
    fused_gate_up: bool = False
    embedding_scale: float = 1.0  # what the family multiplies embeddings by; undone in the file
    tied: bool = True
    vectors: dict = field(default_factory=dict)  # of the whole model: length, mean, deviation


def biases(*names: str) -> dict:
    return {name: (0.0, 0.05) for name in names}


def head_norms(length: str) -> dict:
    return {"attn_q_norm": (length, 1.2, 0.2), "attn_k_norm": (length, 1.2, 0.2)}


POST_NORMS = {"post_attention_norm": ("dim", 0.5, 0.1), "post_ffw_norm": ("dim", 0.5, 0.1)}
ATTENTION = ("attn_q", "attn_k", "attn_v")
ORIGINAL = {"rope.scaling.original_context_length": 64}
YARN = ORIGINAL | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
GEMMA = Family("gemma2", {"attention.sliding_window": 8}, halves=True, norms=POST_NORMS, embedding_scale=288**0.5)
FAMILIES = {
    "llama": Family("llama"),
    "llama-biases": Family("llama", biases=biases(*ATTENTION, "attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    "llama-yarn": Family("llama", YARN),
    "qwen2": Family("qwen2", halves=True, biases=biases(*ATTENTION)),
    "qwen2-zero": Family("qwen2", halves=True, biases={name: (0.0, 0.0) for name in ATTENTION}),
    "qwen3": Family("qwen3", halves=True, norms=head_norms("head_dim")),
    "gemma2": GEMMA,
    "gemma3": replace(GEMMA, architecture="gemma3", keys=GEMMA.keys | {"rope.freq_base": 1e6, "rope.scaling.factor": 2.0},
                      norms=POST_NORMS | head_norms("head_dim")),
    "phi3": Family("phi3", ORIGINAL | {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2, "rope.dimension_count": 32,
                                       "attention.sliding_window": 8},
                   halves=True, fused_qkv=True, fused_gate_up=True,
                   vectors={"rope_factors_short": (16, 1.5, 0.2), "rope_factors_long": (16, 3.0, 0.5)}),
    "mistral3": Family("mistral3", YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
                                           "rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.1},
                       biases=biases("attn_output")),
    "smollm3": Family("smollm3"),
    "olmo2": Family("olmo2", YARN | {"attention.sliding_window": 8, "rope.scaling.attn_factor": 1.1}, halves=True, pre_norms=False,
                    norms=POST_NORMS | head_norms("dim"), tied=False),
    "granite": Family("granite", {"embedding_scale": 12.0, "residual_scale": 0.8, "attention.scale": 0.2, "logit_scale": 1.25},
                      embedding_scale=12.0),
    "glm4": Family("glm4", {"rope.dimension_count": 24}, biases=biases(*ATTENTION), norms=POST_NORMS, fused_gate_up=True),
}


def family(name: str) -> Callable[[Checkpoint, dict, Path], None]:
    return lambda model, vocabulary, out: re_expressed(FAMILIES[name], model, vocabulary, out)


def llama3_rope(model: Checkpoint, vocabulary: dict, out: Path) -> None:
    re_expressed(Family("llama"), model, vocabulary, out, llama3_factors(model.head_dim))


def re_expressed(family: Family, model: Checkpoint, vocabulary: dict, out: Path, rope_factors: np.ndarray | None = None) -> None:
    random = np.random.default_rng(SEED)
    lengths = {"dim": model.dim, "head_dim": model.head_dim}
    seeded = lambda length, mean, deviation: mean + deviation * random.normal(size=lengths.get(length, length))
    # llama.cpp looks for families in names, and then for their tokens.
    writer = start(out, family.architecture, "stories15M", model, vocabulary, width=model.dim, heads=model.heads, kv_heads=model.kv_heads,
                   epsilon=EPSILON, keys=family.keys)
    order = (lambda rows: to_halves(rows, model.head_dim)) if family.halves else (lambda rows: rows)
    add(writer, "token_embd.weight", model.embedding / family.embedding_scale)
    if rope_factors is not None:
        add(writer, "rope_freqs.weight", rope_factors)
    for name, numbers in family.vectors.items():
        add(writer, f"{name}.weight", seeded(*numbers))
    for i in range(model.layers):
        block = f"blk.{i}."
        matrices = {"attn_q": order(model.q[i]), "attn_k": order(model.k[i]), "attn_v": model.v[i], "attn_output": model.o[i],
                    "ffn_gate": model.gate[i], "ffn_up": model.up[i], "ffn_down": model.down[i]}
        if family.fused_qkv:
            matrices["attn_qkv"] = np.concatenate([matrices.pop(part) for part in ATTENTION])
        if family.fused_gate_up:
            matrices["ffn_up"] = np.concatenate([matrices.pop("ffn_gate"), matrices["ffn_up"]])
        if family.pre_norms:
            add(writer, block + "attn_norm.weight", model.attention_norm[i])
            add(writer, block + "ffn_norm.weight", model.ffn_norm[i])
        for part, numbers in family.norms.items():
            add(writer, block + f"{part}.weight", seeded(*numbers))
        for part, matrix in matrices.items():
            add(writer, block + f"{part}.weight", matrix)
            if part in family.biases:
                add(writer, block + f"{part}.bias", seeded(len(matrix), *family.biases[part]))
    # A tied head is the embedding as it stands in the file.
    add(writer, "output_norm.weight", model.output_norm * (family.embedding_scale if family.tied else 1.0))
    if not family.tied:
        add(writer, "output.weight", model.embedding)
    finish(writer)


def to_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Llama rotates neighbours (2i, 2i+1), qwen2 rotates (i, i + head_dim/2): the rows of each head move accordingly."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(head_dim: int, base: float = 10000.0) -> np.ndarray:
    """Llama 3.1's rope scaling (factor 8, low 1, high 4) for an original context of 64, short enough to act on this model."""
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    factor, low, high, original = 8.0, 1.0, 4.0, 64.0
    smooth = (original / wavelengths - low) / (high - low)
    scaled = 1.0 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, scaled))


def wide(model: Checkpoint, vocabulary: dict, out: Path) -> None:
    """The residual stream is padded with zeros and rotated by an orthogonal matrix, which RMS norm does not notice once its
    weights are folded into the matrices that follow; what the norms keep is the constant that undoes the padding."""
    kept = kept_tokens(model.vocabulary)
    vocabulary = {name: [values[i] for i in kept] for name, values in vocabulary.items()}
    writer = start(out, "llama", "stories15M at width 512", model, vocabulary, width=WIDE, heads=WIDE_HEADS, kv_heads=WIDE_HEADS,
                   epsilon=EPSILON * model.dim / WIDE)
    rotation = np.linalg.qr(np.random.default_rng(SEED).normal(size=(WIDE, WIDE)))[0][: model.dim]  # dim x WIDE, orthonormal rows
    norm = np.full(WIDE, np.sqrt(model.dim / WIDE))
    reads = lambda matrix, weight: (matrix.astype(np.float64) * weight) @ rotation
    writes = lambda matrix: rotation.T @ matrix
    heads = lambda matrix: np.pad(matrix, ((0, WIDE_HEADS * model.head_dim - matrix.shape[0]), (0, 0)))
    add(writer, "token_embd.weight", model.embedding[kept] @ rotation)
    for i in range(model.layers):
        block = f"blk.{i}."
        add(writer, block + "attn_norm.weight", norm)
        for name in ("q", "k", "v"):
            add(writer, block + f"attn_{name}.weight", heads(reads(getattr(model, name)[i], model.attention_norm[i])))
        add(writer, block + "attn_output.weight", writes(np.pad(model.o[i], ((0, 0), (0, WIDE_HEADS * model.head_dim - model.dim)))))
        add(writer, block + "ffn_norm.weight", norm)
        add(writer, block + "ffn_gate.weight", reads(model.gate[i], model.ffn_norm[i]))
        add(writer, block + "ffn_up.weight", reads(model.up[i], model.ffn_norm[i]))
        add(writer, block + "ffn_down.weight", writes(model.down[i]))
    add(writer, "output_norm.weight", norm)
    add(writer, "output.weight", reads(model.embedding[kept], model.output_norm))
    finish(writer)


def kept_tokens(vocabulary: int) -> list[int]:
    """Special and byte tokens, the first merges, and all single characters, which Llama's vocabulary has at its end."""
    characters = range(29871, vocabulary)
    return [*range(8192 - len(characters)), *characters]


RECIPES = {name: family(name) for name in FAMILIES} | {"llama3-rope": llama3_rope, "wide": wide}

if __name__ == "__main__":
    main()
