"""Requantizes a GGUF file with llama.cpp's own quantizer (the prebuilt libraries of npm's @node-llama-cpp/linux-x64).

    python quantize.py LIBRARY_FOLDER IN.gguf TYPE OUT.gguf [--mixed]

By default every matrix gets exactly TYPE; with --mixed llama.cpp chooses more precise types for some, as in published files
(Q4_K then means Q4_K_M). Decides nothing else, and writes nothing but OUT.
"""

import argparse
import ctypes
import sys
from pathlib import Path

# llama.h, enum llama_ftype; for K-quants the _S or _M value: with `pure` only the base type counts.
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17,
              "Q6_K": 18, "BF16": 32, "IQ3_S": 26, "IQ4_NL": 25, "IQ4_XS": 30}


class Parameters(ctypes.Structure):
    """The head of llama_model_quantize_params of llama.cpp 0.5.0; the pointers behind it stay as the library set them."""

    _fields_ = [("threads", ctypes.c_int32), ("file_type", ctypes.c_int32), ("output_type", ctypes.c_int32),
                ("embedding_type", ctypes.c_int32), ("allow_requantize", ctypes.c_bool), ("quantize_output", ctypes.c_bool),
                ("only_copy", ctypes.c_bool), ("pure", ctypes.c_bool), ("keep_split", ctypes.c_bool), ("dry_run", ctypes.c_bool),
                ("rest", ctypes.c_void_p * 5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("type", choices=sorted(FILE_TYPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixed", action="store_true")
    args = parser.parse_args()

    llama = load(args.library)
    parameters = llama.llama_model_quantize_default_params()
    if not parameters.quantize_output or parameters.pure or parameters.only_copy:
        sys.exit("llama_model_quantize_params is laid out otherwise than in llama.cpp 0.5.0: pin the package to that version")
    parameters.file_type = FILE_TYPES[args.type]
    parameters.allow_requantize = True
    parameters.pure = not args.mixed
    status = llama.llama_model_quantize(str(args.source).encode(), str(args.out).encode(), ctypes.byref(parameters))
    if status != 0:
        sys.exit(f"llama_model_quantize of {args.source.name} to {args.type} failed with status {status}")


def load(folder: Path) -> ctypes.CDLL:
    """libllama with its dependencies, in their order; the processor's own library is chosen by ggml."""
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    [ggml_path] = folder.glob("libggml.v*.so")
    ggml = ctypes.CDLL(str(ggml_path), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    [llama_path] = folder.glob("libllama.v*.so")
    llama = ctypes.CDLL(str(llama_path))
    llama.llama_model_quantize_default_params.restype = Parameters
    return llama


if __name__ == "__main__":
    main()
