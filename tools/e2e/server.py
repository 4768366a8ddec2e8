"""Runs llama.cpp's own HTTP server, out of its wheel, on the weights of model.py: server.py WEIGHTS PORT."""
import signal
import sys

import xllamacpp


def main(weights, port):
    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.model_alias = ["words"] if not isinstance(params.model_alias, str) else "words"
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_ctx = 8192
    params.n_parallel = 4
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.verbosity = 0
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.offline = True
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
