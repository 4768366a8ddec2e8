//! Chunk framing: every case over every split.
use iop_dataplane::shard::http1::{
    CHUNK_END, CHUNK_HEAD_BYTES_MAX, ChunkDecoder, LAST_CHUNK, write_chunk_head,
};
use iop_proto::limits::{CHUNK_EXTENSION_BYTES_MAX, HEADERS_MAX, TRAILER_BYTES_MAX};
use iop_proto::reason::Reason;

use crate::dice::Dice;

/// Body, and bytes of the input that belong to it if it has ended.
type Decoded = Result<(Vec<u8>, Option<usize>), Reason>;

/// Decodes `pieces` as they would arrive.
fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Decoded {
    let (mut decoder, mut body, mut read) = (ChunkDecoder::default(), Vec::new(), 0);
    for piece in pieces {
        let mut at = 0;
        while at < piece.len() {
            let step = decoder.step(&piece[at..])?;
            assert!(step.done || step.consumed > 0, "no progress");
            assert_eq!(step.data.end, step.consumed);
            body.extend_from_slice(&piece[at..][step.data]);
            at += step.consumed;
            if step.done {
                return Ok((body, Some(read + at)));
            }
        }
        read += piece.len();
    }
    Ok((body, None))
}

/// Decodes whole, bytewise and at every split into two; all must tell the same.
fn every_way(input: &[u8]) -> Decoded {
    let whole = decode([input]);
    assert_eq!(
        decode(input.chunks(1)),
        whole,
        "bytewise: {}",
        input.escape_ascii()
    );
    for at in 0..=input.len() {
        let (a, b) = input.split_at(at);
        assert_eq!(
            decode([a, b]),
            whole,
            "split at {at}: {}",
            input.escape_ascii()
        );
    }
    whole
}

#[test]
fn well_formed_bodies_are_decoded_and_end_where_they_end() {
    let long = format!(
        "000000000000000A\r\n0123456789\r\n{}\r\n\r\n",
        "0".repeat(16)
    );
    for (input, body) in [
        ("0\r\n\r\n", ""),
        ("5\r\nhello\r\n0\r\n\r\n", "hello"),
        ("5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", "hello world"),
        ("b\r\n\r\n0\r\n\r\nGET \r\n0\r\n\r\n", "\r\n0\r\n\r\nGET "),
        (
            "A;x=\"y;z\";\t q\r\n0123456789\r\n0;last\r\n\r\n",
            "0123456789",
        ),
        (
            "1\r\na\r\n0\r\nTrailer: x\r\nContent-Length: 5\r\nlast:\r\n\r\n",
            "a",
        ),
        (&long, "0123456789"),
    ] {
        let next = format!("{input}GET / HTTP/1.1\r\n");
        let expected = Ok((body.as_bytes().to_vec(), Some(input.len())));
        assert_eq!(every_way(next.as_bytes()), expected, "{input}");
        for end in 0..input.len() {
            let (_, ended) = decode([&input.as_bytes()[..end]]).unwrap();
            assert_eq!(ended, None, "{input} cut at {end}");
        }
    }
}

/// Proves [D-14].
#[test]
fn d14_malformed_chunks_are_refused() {
    for input in [
        "\r\n",
        ";x\r\n",
        "g\r\n",
        "-1\r\n",
        "+1\r\n",
        "0x1\r\n",
        " 1\r\na\r\n",
        "1 \r\na\r\n",
        "1\t;x\r\na\r\n",
        "1\na\r\n",
        "1\r\r\n",
        "1;\n",
        "1;a\0b\r\n",
        "1;a\rb\r\n",
        "1\r\nab\r\n",
        "1\r\na\n",
        "1\r\na\rb",
        "2\r\na\r\n0\r\n\r\n",
        "00000000000000000\r\n",
        "10000000000000000\r\n",
        "0\r\n\n",
        "0\r\n\r\r",
        "0\r\n folded\r\n\r\n",
        "0\r\n:\r\n\r\n",
        "0\r\nX\r\n\r\n",
        "0\r\nX : a\r\n\r\n",
        "0\r\nX: a\r\n b\r\n\r\n",
        "0\r\nGET / HTTP/1.1\r\n\r\n",
        "0\r\nX: a\n\r\n",
        "0\r\nX: \0\r\n\r\n",
    ] {
        assert_eq!(
            every_way(input.as_bytes()),
            Err(Reason::ChunkMalformed),
            "{input:?}"
        );
    }
}

#[test]
fn extensions_and_trailers_are_bounded_over_the_whole_body() {
    let extension = |bytes: u32| format!("1;{}\r\na\r\n0\r\n\r\n", "e".repeat(bytes as usize));
    let split = |bytes: u32| {
        let half = "e".repeat(bytes as usize / 2);
        format!("1;{half}\r\na\r\n1;{half}\r\nb\r\n0\r\n\r\n")
    };
    let trailer = |bytes: u32| format!("0\r\nt:{}\r\n\r\n", "t".repeat(bytes as usize - 2));
    let trailers = |fields: u32| format!("0\r\n{}\r\n", "t: t\r\n".repeat(fields as usize));
    let (extensions_max, trailers_max) = (CHUNK_EXTENSION_BYTES_MAX, TRAILER_BYTES_MAX);
    for (largest, larger) in [
        (extension(extensions_max), extension(extensions_max + 1)),
        (split(extensions_max), split(extensions_max + 2)),
        (trailer(trailers_max), trailer(trailers_max + 1)),
        (trailers(HEADERS_MAX), trailers(HEADERS_MAX + 1)),
    ] {
        assert!(matches!(decode([largest.as_bytes()]), Ok((_, Some(_)))));
        assert_eq!(decode([larger.as_bytes()]), Err(Reason::ChunkMalformed));
    }
}

#[test]
fn the_largest_chunk_size_is_taken_at_its_word() {
    let (body, ended) = decode([&b"ffffffffffffffff\r\nabc"[..]]).unwrap();
    assert_eq!((body.as_slice(), ended), (&b"abc"[..], None));
}

#[test]
fn what_is_written_is_read_back() {
    let mut dice = Dice::new(7);
    let mut line = [0; CHUNK_HEAD_BYTES_MAX];
    assert_eq!(
        write_chunk_head(&mut line, usize::MAX),
        CHUNK_HEAD_BYTES_MAX
    );
    for _ in 0..200 {
        let (mut sent, mut wire) = (Vec::new(), Vec::new());
        for _ in 0..dice.below(6) {
            let data: Vec<u8> = (0..=dice.below(300))
                .map(|_| dice.pick(b"a\r\n0;"))
                .collect();
            let len = write_chunk_head(&mut line, data.len());
            wire.extend_from_slice(&[&line[..len], &data, CHUNK_END].concat());
            sent.extend_from_slice(&data);
        }
        wire.extend_from_slice(LAST_CHUNK);
        let piece = 1 + dice.below(40);
        assert_eq!(decode(wire.chunks(piece)), Ok((sent, Some(wire.len()))));
    }
}
