"""The oracle: what llama.cpp computes with the same file and the same tokens.

Reads requests (JSON) from standard input, one a line, and writes the answer (JSON) to each as a line to standard output. Uses the
llama.cpp inside PyPI's xllamacpp through its C interface, because its HTTP server gives no logits of prompt tokens. Answers are kept in
the folder given as the only argument, under a name made of the model's, this script's and the library's bytes and the request.

Request   {"model": path, "exact": flag, "quantized_kv": flag, "threads": n, "context": n,
           "greedy": [{"prompt": text, "tokens": n}], "next": [{"prompt": text, "top": n}],
           "text": null | {"path": path, "window": n, "windows": n, "top": n, or 0 for none}}
Answer    {"version": text,
           "greedy": [{"prompt": [id], "tokens": [id], "top": [[[id, logit], [id, logit]]], "batch_noise": x or null}],
           "next":   [{"prompt": [id], "top": [[id, logprob]]}],
           "text":   null | {"tokens": [id], "logprobs": [x], "top": [[[id, logprob]]]}}

Prompts are tokenized with special tokens added as the file says, and no special token is recognised inside them. `greedy`
decodes one token of each prompt at a time, all in one batch, which reads the weights once; its `top` has the two largest logits at each step. `text` splits the text's first window x windows
tokens (BOS, if any, once at the start) into windows, each computed on its own in one batch; logprobs are of the tokens 1.. of
each window, `top` the largest at the same places. Natural logarithms.

`batch_noise` is how far llama.cpp is from itself: the largest difference of a logit between one token at a time and all tokens of the prompt in
one batch; of the first prompt only, null for the others. Its kernels for quantized weights round activations to eight bits, so a difference in the last bit of a float can turn into one
of a quantization step. With `exact` the weights are written out as F32 first (dequantize.py): no activation is rounded, and what remains is
the KV cache's F16. With `quantized_kv` keys and values are cached as Q8_0; llama.cpp then rounds queries to eight bits, too.

Decides nothing about what agrees; the tests do.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
import dequantize

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other tests run beside this one; read when llama.cpp is loaded


def main() -> None:
    cache = Path(sys.argv[1])
    cache.mkdir(parents=True, exist_ok=True)
    programs = b"".join(map(digest, (__file__, dequantize.__file__, library_path())))
    for line in sys.stdin:
        request = json.loads(line)
        files = [request["model"], *([request["text"]["path"]] if request["text"] else [])]
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode() + programs + b"".join(map(digest, files)))
        kept = cache / f"{key.hexdigest()}.json"
        if not kept.exists():
            answer = json.dumps(compute(request))
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(answer)
            os.replace(partial, kept)
        print(kept.read_text(), flush=True)


def digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def compute(request: dict) -> dict:
    with contextlib.ExitStack() as stack:
        model = request["model"]
        if request["exact"]:
            model = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "exact.gguf")
            dequantize.dequantize(Path(request["model"]), Path(model))
        sequences = max(1, len(request["greedy"]))
        session = Session(model, request["threads"], request["context"], sequences, request["quantized_kv"])
        stack.enter_context(contextlib.closing(session))
        return {
            "version": session.lib.llama_version().decode(),
            "greedy": greedy(session, request["greedy"]),
            "next": [following(session, job["prompt"], job["top"]) for job in request["next"]],
            "text": score(session, **request["text"]) if request["text"] else None,
        }


def greedy(session: "Session", jobs: list[dict]) -> list[dict]:
    session.clear()
    answers = [{"prompt": session.tokenize(job["prompt"]), "tokens": [], "top": [], "batch_noise": None} for job in jobs]
    logits = [session.decode(answer["prompt"], 0, sequence)[-1] for sequence, answer in enumerate(answers)]
    active = list(range(len(jobs)))
    while active:
        for sequence, row in zip(active, logits, strict=True):
            answer = answers[sequence]
            answer["top"] += largest(row[None], 2)
            answer["tokens"].append(answer["top"][-1][0][0])
        active = [sequence for sequence in active if len(answers[sequence]["tokens"]) < jobs[sequence]["tokens"]]
        # Each sequence's last token stands at the place before its end.
        ends = [len(answers[sequence]["prompt"]) + len(answers[sequence]["tokens"]) - 1 for sequence in active]
        tokens = [answers[sequence]["tokens"][-1] for sequence in active]
        logits = session.run(list(zip(tokens, ends, active, strict=True))) if active else []
    for answer in answers[:1]:
        session.clear()
        batch = session.decode(answer["prompt"] + answer["tokens"][:-1], 0)[len(answer["prompt"]) - 1 :]
        answer["batch_noise"] = max(abs(logit - float(batch[step][i])) for step, pair in enumerate(answer["top"]) for i, logit in pair)
    return answers


def following(session: "Session", prompt: str, top: int) -> dict:
    ids = session.tokenize(prompt)
    session.clear()
    return {"prompt": ids, "top": largest(log_softmax(session.decode(ids, 0)[-1:]), top)[0]}


def score(session: "Session", path: str, window: int, windows: int, top: int) -> dict:
    # English has about four characters a token; sixteen are ample, and the whole book would take long.
    ids = session.tokenize(Path(path).read_text()[: 16 * window * windows])[: window * windows]
    if len(ids) < window * windows:
        sys.exit(f"{path} gives {len(ids)} tokens, {window * windows} are needed")
    logprobs, tops = [], []
    for at in range(0, len(ids), window):
        part = ids[at : at + window]
        session.clear()
        for row, token in zip(session.decode(part, 0), part[1:]):
            row = log_softmax(row[None])
            logprobs.append(float(row[0, token]))
            tops += largest(row, top) if top else []
    return {"tokens": ids, "logprobs": logprobs, "top": tops}


def largest(rows: np.ndarray, count: int) -> list[list]:
    """The largest numbers of each row, with their places."""
    candidates = np.argpartition(-rows, count - 1, axis=-1)[:, :count]
    order = np.argsort(-np.take_along_axis(rows, candidates, axis=-1), axis=-1)
    best = np.take_along_axis(candidates, order, axis=-1)
    return [[[int(i), float(row[i])] for i in ids] for row, ids in zip(rows, best, strict=True)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Parameters(ctypes.Structure):
    """llama_context_params: the fields set here, and room for what is between and behind them, as the library fills it."""

    _fields_ = [("context", ctypes.c_uint32), ("batch", ctypes.c_uint32), ("micro_batch", ctypes.c_uint32),
                ("sequences", ctypes.c_uint32), ("snapshots", ctypes.c_uint32), ("outputs", ctypes.c_uint32),
                ("sequence_outputs", ctypes.c_uint32), ("threads", ctypes.c_int32), ("batch_threads", ctypes.c_int32),
                ("kinds", ctypes.c_int32 * 4), ("flash_attention", ctypes.c_int32), ("between", ctypes.c_uint64 * 6),
                ("key_type", ctypes.c_int32), ("value_type", ctypes.c_int32), ("rest", ctypes.c_uint64 * 25)]


F16, Q8_0 = 1, 8  # of enum ggml_type


class ModelParameters(ctypes.Structure):
    """llama_model_params, passed on as the library fills it: memory-mapped, no processor but the CPU."""

    _fields_ = [("all", ctypes.c_uint64 * 32)]


class Batch(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embedding", ctypes.c_void_p),
                ("position", ctypes.POINTER(ctypes.c_int32)), ("sequences", ctypes.POINTER(ctypes.c_int32)),
                ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("output", ctypes.POINTER(ctypes.c_int8))]


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@LOG
def log(level: int, text: bytes, _: object) -> None:
    """Passes errors on. llama.cpp keeps it for as long as it is loaded."""
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


class Session:
    """One model and one context of llama.cpp."""

    def __init__(self, model: str, threads: int, context: int, sequences: int, quantized_kv: bool):
        """`context`: the longest sequence, in tokens; `sequences`: as many of them at once."""
        self.lib = lib = ctypes.CDLL(library_path())
        for name, result, arguments in [
            ("llama_version", ctypes.c_char_p, []),
            ("llama_log_set", None, [LOG, ctypes.c_void_p]),
            ("llama_model_default_params", ModelParameters, []),
            ("llama_context_default_params", Parameters, []),
            ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, ModelParameters]),
            ("llama_model_free", None, [ctypes.c_void_p]),
            ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, Parameters]),
            ("llama_free", None, [ctypes.c_void_p]),
            ("llama_model_get_vocab", ctypes.c_void_p, [ctypes.c_void_p]),
            ("llama_vocab_n_tokens", ctypes.c_int32, [ctypes.c_void_p]),
            ("llama_tokenize", ctypes.c_int32, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32),
                                                ctypes.c_int32, ctypes.c_bool, ctypes.c_bool]),
            ("llama_batch_init", Batch, [ctypes.c_int32] * 3),
            ("llama_batch_free", None, [Batch]),
            ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, Batch]),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
            ("llama_get_memory", ctypes.c_void_p, [ctypes.c_void_p]),
            ("llama_memory_clear", None, [ctypes.c_void_p, ctypes.c_bool]),
        ]:
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.llama_log_set(log, None)
        lib.llama_backend_init()
        parameters = lib.llama_context_default_params()
        found = (parameters.context, parameters.batch, parameters.micro_batch, parameters.sequences, parameters.flash_attention,
                 parameters.key_type, parameters.value_type)
        if found != (512, 2048, 512, 1, -1, F16, F16):
            sys.exit("llama_context_params is laid out otherwise than this script expects: pin xllamacpp to the version of requirements.in")
        self.model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {model}")
        parameters.batch = parameters.micro_batch = context
        parameters.context, parameters.sequences = context * sequences, sequences
        parameters.flash_attention = 0  # its CPU kernel sums values in F16
        if quantized_kv:
            parameters.key_type = parameters.value_type = Q8_0
            parameters.flash_attention = 1  # there is no other kernel for values as Q8_0; it sums these in F32
        parameters.threads = parameters.batch_threads = threads
        self.context = lib.llama_init_from_model(self.model, parameters)
        if not self.context:
            sys.exit(f"llama.cpp cannot make a context of {context} for {model}")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocabulary = lib.llama_vocab_n_tokens(self.vocab)
        self.batch = lib.llama_batch_init(context, 0, 1)
        self.size = context

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, False)
        if count < 0:
            sys.exit(f"llama.cpp cannot tokenize {text[:40]!r}...")
        return list(ids[:count])

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def decode(self, ids: list[int], position: int, sequence: int = 0) -> np.ndarray:
        """Logits (tokens x vocabulary) after each of the tokens, which stand at `position` of the sequence and behind."""
        if position + len(ids) > self.size:
            sys.exit(f"{position + len(ids)} tokens do not fit a context of {self.size}")
        return self.run([(token, position + i, sequence) for i, token in enumerate(ids)])

    def run(self, entries: list[tuple[int, int, int]]) -> np.ndarray:
        """Logits (tokens x vocabulary) after each of the tokens, which are given with their place in a sequence and its number."""
        self.batch.count = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            self.batch.token[i], self.batch.position[i] = token, position
            self.batch.sequences[i], self.batch.sequence[i][0], self.batch.output[i] = 1, sequence, 1
        status = self.lib.llama_decode(self.context, self.batch)
        if status != 0:
            sys.exit(f"llama_decode of {len(entries)} tokens failed with status {status}")
        rows = (self.lib.llama_get_logits_ith(self.context, i) for i in range(len(entries)))
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows])

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


def library_path() -> str:
    """xllamacpp's extension module, which has llama.cpp inside; found without importing it."""
    for folder in sys.path:
        for path in Path(folder).glob("xllamacpp/xllamacpp*.so"):
            return str(path)
    sys.exit("xllamacpp is not installed for this Python: run `make assets`")


if __name__ == "__main__":
    main()
