"""llama.cpp's server out of the wheel `xllamacpp`, run by a Python that has it: prints its address, ends with its input.

pip install xllamacpp  # in an environment of its own
python recipes/real/llama_wheel.py FILE.gguf [THREADS]
"""

from __future__ import annotations

import sys
from importlib.metadata import version


def main() -> None:
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.port = 1024, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
    params.warmup, params.ui = False, False
    server = llama.Server(params)
    print(f"xllamacpp {version('xllamacpp')}", server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
