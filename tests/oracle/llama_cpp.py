"""The oracle: what llama.cpp computes with the same file and the same tokens.

Reads requests (JSON) from standard input, one a line, and writes the answer (JSON) to each as a line to standard output. Answers are kept in
the folder given as the only argument, under a name made of the bytes of the model, the text, these scripts and the library, and of the request;
where a file lies makes no difference. What computes them (llama_cpp_answers.py) is loaded for the first that is not there.

Request   {"model": path, "exact": flag, "quantized_kv": flag, "threads": n, "context": n,
           "greedy": [{"prompt": text, "tokens": n, "top": n}],
           "text": null | {"path": path, "window": n, "windows": n, "top": n, "of": [[id]]}}
Answer    {"version": text,
           "greedy": [{"prompt": [id], "tokens": [id], "best": [[[id, logit], [id, logit]]], "top": [[id, logprob]]}],
           "text":   null | {"tokens": [id], "logprobs": [x], "top": [[[id, logprob]]]}}

Prompts are tokenized with special tokens added as the file says, and no special token is recognised inside them. `greedy` decodes one token
of each prompt at a time, all in one batch, which reads the weights once. Its `best` are the two largest logits at each step, its `top` the most
likely tokens after the prompt. `text` splits the text's first window x windows tokens (BOS, if any, once at the start) into windows, each computed
on its own. Logprobs are of the tokens 1.. of each window. At the same places, `top` are the tokens that `of` has there; where `of` is empty, the
n most likely, or none where n is 0. Natural logarithms.

With `exact` the weights are written out as F32 first (dequantize.py): no activation is rounded to eight bits, and what remains is the KV
cache's F16. With `quantized_kv` keys and values are cached as Q8_0; llama.cpp then rounds queries to eight bits, too.

Decides nothing about what agrees; the tests do.
"""

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = [HERE / "llama_cpp.py", HERE / "llama_cpp_answers.py", HERE.parent / "assets" / "dequantize.py"]


def main() -> None:
    cache = Path(sys.argv[1])
    cache.mkdir(parents=True, exist_ok=True)
    library = library_path()
    programs = b"".join(map(digest, [*SCRIPTS, list_of_files(library)]))
    for line in sys.stdin:
        request = json.loads(line)
        kept = cache / f"{name_of(request, programs)}.json"
        if not kept.exists():
            # NumPy takes a while to load.
            from llama_cpp_answers import compute

            answer = json.dumps(compute(request, library))
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(answer)
            os.replace(partial, kept)
        print(kept.read_text(), flush=True)


def name_of(request: dict, programs: bytes) -> str:
    """Of its answer."""
    text = request["text"]
    files = [request["model"], *([text["path"]] if text else [])]
    asked = request | {"model": None, "text": text and text | {"path": None}}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode() + programs + b"".join(map(digest, files))).hexdigest()


def digest(path: str | Path) -> bytes:
    """Of a file's bytes. Some tests write several files under one name."""
    found = os.stat(path)
    return digest_of(str(path), found.st_ino, found.st_size, found.st_mtime_ns)


@functools.cache
def digest_of(path: str, *_version: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def library_path() -> str:
    """xllamacpp's extension module, which has llama.cpp inside; found without importing it."""
    for folder in sys.path:
        for path in Path(folder).glob("xllamacpp/xllamacpp*.so"):
            return str(path)
    sys.exit("xllamacpp is not installed for this Python: run `make assets`")


def list_of_files(library: str) -> Path:
    """What pip notes of the package: the digest of each of its files. To read the library itself takes longer than most kept answers do."""
    [record] = Path(library).parent.parent.glob("xllamacpp-*.dist-info/RECORD")
    return record


if __name__ == "__main__":
    main()
