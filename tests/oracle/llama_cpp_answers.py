"""What the oracle (llama_cpp.py) answers, computed: by the llama.cpp inside PyPI's xllamacpp, through its C interface, because its HTTP server
gives no logits of prompt tokens.

Decides nothing but how: what is asked and answered stands in llama_cpp.py.
"""

import contextlib
import ctypes
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other tests run beside this one; read when llama.cpp is loaded

AT_ONCE = 256  # tokens of a window in one batch; the logits of more, in a large vocabulary, would take a gigabyte


def compute(request: dict, library: str) -> dict:
    with contextlib.ExitStack() as stack:
        model = request["model"]
        if request["exact"]:
            # The gguf package takes a while to load, and few requests need it.
            import dequantize

            model = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "exact.gguf")
            dequantize.dequantize(Path(request["model"]), Path(model))
        sequences = max(1, len(request["greedy"]))
        session = Session(library, model, request["threads"], request["context"], sequences, request["quantized_kv"])
        stack.enter_context(contextlib.closing(session))
        return {
            "version": session.lib.llama_version().decode(),
            "greedy": greedy(session, request["greedy"]),
            "text": score(session, **request["text"]) if request["text"] else None,
        }


def greedy(session: "Session", jobs: list[dict]) -> list[dict]:
    session.clear()
    answers = []

    def note(answer: dict, row: np.ndarray) -> None:
        answer["best"].append(two_largest(row))
        answer["tokens"].append(answer["best"][-1][0][0])

    for sequence, job in enumerate(jobs):
        prompt = session.tokenize(job["prompt"])
        row = session.last(prompt, sequence)
        answers.append({"prompt": prompt, "tokens": [], "best": [], "top": logprobs(row, largest(row, job["top"]))})
        note(answers[-1], row)
    active = list(range(len(jobs)))
    while active := [sequence for sequence in active if len(answers[sequence]["tokens"]) < jobs[sequence]["tokens"]]:
        # Each sequence's last token stands at the place before its end.
        ends = [len(answers[sequence]["prompt"]) + len(answers[sequence]["tokens"]) - 1 for sequence in active]
        tokens = [answers[sequence]["tokens"][-1] for sequence in active]
        rows = session.run(list(zip(tokens, ends, active, strict=True)))
        for sequence, row in zip(active, rows, strict=True):
            note(answers[sequence], row)
    return answers


def score(session: "Session", path: str, window: int, windows: int, top: int, of: list[list[int]]) -> dict:
    # English has about four characters a token; sixteen are ample, and the whole book would take long.
    ids = session.tokenize(Path(path).read_text()[: 16 * window * windows])[: window * windows]
    if len(ids) < window * windows:
        sys.exit(f"{path} gives {len(ids)} tokens, {window * windows} are needed")
    scores, tops = [], []
    for at in range(0, len(ids), window):
        part = ids[at : at + window]
        session.clear()
        for first in range(0, window, AT_ONCE):
            # Behind the last token of a window stands none.
            for row, token in zip(session.decode(part[first : first + AT_ONCE], first), part[first + 1 :]):
                wanted = of[len(scores)] if of else largest(row, top) if top else []
                [(_, logprob), *others] = logprobs(row, [token, *wanted])
                scores.append(logprob)
                tops.append(others)
    return {"tokens": ids, "logprobs": scores, "top": tops}


def two_largest(row: np.ndarray) -> list[list]:
    """The two largest numbers, with their places. In a large vocabulary `largest` takes many times as long."""
    first = int(row.argmax())
    logit = row[first]
    row[first] = -np.inf
    second = int(row.argmax())
    row[first] = logit
    return [[first, float(logit)], [second, float(row[second])]]


def largest(row: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest numbers, in their order."""
    candidates = np.argpartition(row, -count)[-count:]
    return candidates[np.argsort(-row[candidates])]


def logprobs(logits: np.ndarray, tokens: Iterable[int]) -> list[list]:
    """Tokens with their log probabilities."""
    most = logits.max()
    # Terms are rounded to F32, which changes the sum, in F64, by less than one part in a million.
    whole = float(most) + math.log(np.exp(logits - most).sum(dtype=np.float64))
    return [[int(token), float(logits[token]) - whole] for token in tokens]


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

    def __init__(self, library: str, model: str, threads: int, context: int, sequences: int, quantized_kv: bool):
        """`context`: the longest sequence, in tokens; `sequences`: as many of them at once."""
        self.lib = lib = ctypes.CDLL(library)
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
        parameters.batch = parameters.micro_batch = min(context, AT_ONCE)
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
        self.batch = lib.llama_batch_init(parameters.batch, 0, 1)
        self.most = parameters.batch
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

    def last(self, ids: list[int], sequence: int) -> np.ndarray:
        """The logits after the last of the tokens, with which the sequence begins."""
        [row] = self.run([(token, place, sequence) for place, token in enumerate(ids)], [len(ids) - 1])
        return row

    def decode(self, ids: list[int], position: int) -> list[np.ndarray]:
        """The logits after each of the tokens, which stand at `position` of the first sequence and behind."""
        return self.run([(token, position + place, 0) for place, token in enumerate(ids)])

    def run(self, entries: list[tuple[int, int, int]], wanted: Sequence[int] | None = None) -> list[np.ndarray]:
        """A row of logits after each of the tokens, which are given with their place in a sequence and its number, or after those that are
        `wanted`. Rows are llama.cpp's own memory: they hold until the next run."""
        wanted = range(len(entries)) if wanted is None else wanted
        if len(entries) > self.most:
            sys.exit(f"{len(entries)} tokens do not fit a batch of {self.most}")
        self.batch.count = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            if position >= self.size:
                sys.exit(f"position {position} does not fit a context of {self.size}")
            self.batch.token[i], self.batch.position[i] = token, position
            self.batch.sequences[i], self.batch.sequence[i][0], self.batch.output[i] = 1, sequence, int(i in wanted)
        status = self.lib.llama_decode(self.context, self.batch)
        if status != 0:
            sys.exit(f"llama_decode of {len(entries)} tokens failed with status {status}")
        rows = (self.lib.llama_get_logits_ith(self.context, i) for i in wanted)
        return [np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows]

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
