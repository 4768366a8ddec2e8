//! Chunked bodies: equal over every split, framed as hyper does, and what we write is what we read.
//!
//! Lives on: one thread. View: the bytes behind a request head. Bound: the input.
use iop_dataplane::shard::http1::{
    CHUNK_END, CHUNK_HEAD_BYTES_MAX, ChunkDecoder, LAST_CHUNK, write_chunk_head,
};
use iop_proto::reason::Reason;

use crate::dice::{Dice, LARGEST_PIECES};
use crate::stream;

const HEAD: &[u8] =
    b"POST /v1/completions HTTP/1.1\r\nhost: edge\r\ntransfer-encoding: chunked\r\n\r\n";

/// Body so far, and bytes of the input that belong to it if it has ended.
type Decoded = Result<(Vec<u8>, Option<usize>), Reason>;

pub(crate) fn run(data: &[u8]) -> bool {
    let whole = decode([data]);
    let mut dice = Dice::of(data);
    for largest in LARGEST_PIECES {
        let split = decode(dice.pieces(data, largest));
        assert_eq!(split, whole, "pieces of {largest}");
    }
    stream::compare(&[HEAD, data].concat());
    let mut wire = Vec::new();
    for piece in dice.pieces(data, 600) {
        let mut line = [0; CHUNK_HEAD_BYTES_MAX];
        let len = write_chunk_head(&mut line, piece.len());
        wire.extend_from_slice(&[&line[..len], piece, CHUNK_END].concat());
    }
    wire.extend_from_slice(LAST_CHUNK);
    let read_back = decode(dice.pieces(&wire, 50));
    assert_eq!(read_back, Ok((data.to_vec(), Some(wire.len()))));
    matches!(whole, Ok((_, Some(_))))
}

fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Decoded {
    let (mut decoder, mut body, mut read) = (ChunkDecoder::default(), Vec::new(), 0);
    for piece in pieces {
        let mut at = 0;
        while at < piece.len() {
            let step = decoder.step(&piece[at..])?;
            assert!(step.done || step.consumed > 0, "no progress");
            assert!(step.data.end == step.consumed && step.data.start <= step.data.end);
            body.extend_from_slice(&piece[at..][step.data]);
            at += step.consumed;
            if step.done {
                let after = decoder.step(&piece[at..])?;
                assert!(after.done && after.consumed == 0, "goes on after its end");
                return Ok((body, Some(read + at)));
            }
        }
        read += piece.len();
    }
    Ok((body, None))
}
