"""llama.cpp's own HTTP server, from a wheel; the arguments are a GGUF file and a port."""

import sys
import time

import xllamacpp  # type: ignore[import-not-found]


def main(path: str, port: int) -> None:
    """Serve until killed."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port = path, port
    params.n_parallel, params.n_ctx = 2, 4096
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    while server.listening_address:
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
