"""Writes a llama-architecture GGUF of random weights that can say a few dozen words, about half a megabyte.

No weights are downloaded: the model server that reads it is real, its answers are noise.
"""
import sys

import gguf
import numpy

WIDTH, LAYERS, HEADS, FEED, CONTEXT = 64, 2, 4, 128, 8192
WORDS = (
    "the a an edge node model token stream frame byte lease queue shard ring core fast slow near far one two "
    "three four five red green blue cat dog bird sea sky sun moon goes comes sees sends reads writes opens closes"
).split()


def vocabulary():
    """Pieces and their kinds: control pieces, one piece per byte, words with a leading blank, ASCII."""
    kinds = gguf.TokenType
    pieces = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    spoken = len(pieces)
    pieces += [("\u2581" + word, kinds.NORMAL) for word in WORDS]
    silent = len(pieces)
    pieces += [("\u2581", kinds.NORMAL)] + [(chr(code), kinds.NORMAL) for code in range(33, 127)]
    return pieces, spoken, silent


def write(path):
    random = numpy.random.default_rng(11)
    pieces, spoken, silent = vocabulary()
    size = len(pieces)

    def noise(*shape, scale=1.0):
        values = random.standard_normal(shape) * scale / numpy.sqrt(shape[-1])
        return values.astype(numpy.float32)

    out = gguf.GGUFWriter(path, "llama")
    out.add_name("words")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FEED)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_vocab_size(size)
    out.add_file_type(0)
    out.add_tokenizer_model("llama")
    out.add_token_list([piece for piece, _ in pieces])
    out.add_token_scores([-1000.0 if kind == gguf.TokenType.BYTE else -float(row) for row, (_, kind) in enumerate(pieces)])
    out.add_token_types([kind for _, kind in pieces])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_add_bos_token(True)
    out.add_add_eos_token(False)
    out.add_chat_template("{% for m in messages %}{{ m['content'] }} {% endfor %}")

    # Dimension 0 is the same for every piece; the output layer uses it to forbid all but the words.
    embedding = random.standard_normal((size, WIDTH)).astype(numpy.float32)
    embedding[:, 0] = 8.0
    output = (random.standard_normal((size, WIDTH)) * 0.35).astype(numpy.float32)
    output[:, 0] = -30.0
    output[spoken:silent, 0] = 0.0
    out.add_tensor("token_embd.weight", embedding)
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        out.add_tensor(name + "attn_norm.weight", numpy.ones(WIDTH, numpy.float32))
        out.add_tensor(name + "ffn_norm.weight", numpy.ones(WIDTH, numpy.float32))
        for part in ("attn_q", "attn_k", "attn_v"):
            out.add_tensor(name + part + ".weight", noise(WIDTH, WIDTH))
        for part, shape in (("attn_output", (WIDTH, WIDTH)), ("ffn_down", (WIDTH, FEED))):
            weights = noise(*shape)
            weights[0, :] = 0.0  # nobody writes to dimension 0
            out.add_tensor(name + part + ".weight", weights)
        out.add_tensor(name + "ffn_gate.weight", noise(FEED, WIDTH))
        out.add_tensor(name + "ffn_up.weight", noise(FEED, WIDTH))
    out.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    out.add_tensor("output.weight", output)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    write(sys.argv[1])
