#!/usr/bin/env python3
"""The oracle of text_tokenizer_parity: how llama.cpp tokenizes, with nothing of a model but its vocabulary.

Reads one request (JSON) from standard input, writes one answer (JSON) to standard output. Uses the llama.cpp inside PyPI's
xllamacpp through its C interface.

Request   {"model": path, "vocabulary": flag, "texts": [{"text": text, "add_special": flag, "parse_special": flag}]}
Answer    {"texts": [[id]], "pieces": [[byte]], "ends": [id]}

`pieces` are the bytes of every token of the vocabulary, control tokens none; `ends` are the tokens that end a generation. Both are empty
where the vocabulary was not asked for.
"""

import ctypes
import json
import sys
from pathlib import Path


class ModelParameters(ctypes.Structure):
    """llama_model_params: the flags set or checked here, and room for what is before and behind them."""

    _fields_ = [("head", ctypes.c_uint64 * 9), ("vocab_only", ctypes.c_bool), ("check_tensors", ctypes.c_bool),
                ("use_extra_bufts", ctypes.c_bool), ("rest", ctypes.c_uint8 * 189)]


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def main() -> None:
    request = json.load(sys.stdin)
    lib = library()
    parameters = lib.llama_model_default_params()
    if (parameters.vocab_only, parameters.check_tensors, parameters.use_extra_bufts) != (False, False, True):
        sys.exit("llama_model_params is laid out otherwise than this script expects: pin xllamacpp to the version of requirements.in")
    parameters.vocab_only = True
    model = lib.llama_model_load_from_file(request["model"].encode(), parameters)
    if not model:
        sys.exit(f"llama.cpp cannot load {request['model']}")
    vocab = lib.llama_model_get_vocab(model)
    count = lib.llama_vocab_n_tokens(vocab) if request["vocabulary"] else 0
    answer = {
        "texts": [tokenize(lib, vocab, **text) for text in request["texts"]],
        "pieces": [list(piece(lib, vocab, token)) for token in range(count)],
        "ends": [token for token in range(count) if lib.llama_vocab_is_eog(vocab, token)],
    }
    json.dump(answer, sys.stdout)


def tokenize(lib: ctypes.CDLL, vocab: int, text: str, add_special: bool, parse_special: bool) -> list[int]:
    data = text.encode()
    ids = (ctypes.c_int32 * (len(data) + 8))()
    count = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), add_special, parse_special)
    if count < 0:
        sys.exit(f"llama.cpp cannot tokenize {text[:40]!r}...")
    return list(ids[:count])


def piece(lib: ctypes.CDLL, vocab: int, token: int) -> bytes:
    room = ctypes.create_string_buffer(4096)
    count = lib.llama_token_to_piece(vocab, token, room, len(room), 0, False)
    if count < 0:
        sys.exit(f"llama.cpp's token {token} takes more than {len(room)} bytes")
    return room.raw[:count]


def library() -> ctypes.CDLL:
    """xllamacpp's extension module, which has llama.cpp inside; found without importing it."""
    paths = [str(path) for folder in sys.path for path in Path(folder).glob("xllamacpp/xllamacpp*.so")]
    if not paths:
        sys.exit("xllamacpp is not installed for this Python: run `make assets`")
    lib = ctypes.CDLL(paths[0])
    text, ids = ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32)
    for name, result, arguments in [
        ("llama_log_set", None, [LOG, ctypes.c_void_p]),
        ("llama_model_default_params", ModelParameters, []),
        ("llama_model_load_from_file", ctypes.c_void_p, [text, ModelParameters]),
        ("llama_model_get_vocab", ctypes.c_void_p, [ctypes.c_void_p]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [ctypes.c_void_p]),
        ("llama_vocab_is_eog", ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int32]),
        ("llama_tokenize", ctypes.c_int32, [ctypes.c_void_p, text, ctypes.c_int32, ids, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool]),
        ("llama_token_to_piece", ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int32, text, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool]),
    ]:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    # The library holds on to the callback: it must not be collected.
    lib.log = LOG(lambda level, line, _: sys.stderr.write(line.decode(errors="replace")) if level == 4 else None)
    lib.llama_log_set(lib.log, None)
    lib.llama_backend_init()
    return lib


if __name__ == "__main__":
    main()
