//! Record protection against stock TLS stacks: rustls in memory, `openssl s_client` over a socket, and
//! a peer that seals whatever it likes.
//!
//! Lives on: test threads. Bound: a few records per case.
#![expect(clippy::unwrap_used, reason = "a helper's panic is its test's failure")]
mod tls_support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use iop_dataplane::alloc::{Counting, heap_calls};
use iop_dataplane::tls::record::{Alert, DATALESS_RECORDS_MAX};
use iop_dataplane::tls::{Opened, Records, ReplyBuf, ServerHandshake, TlsError};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::{CipherSuite, ClientConnection, ConnectionTrafficSecrets};
use tls_support::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SUITES: [CipherSuite; 3] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
];

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| u8::try_from(at * 7 % 251).unwrap())
        .collect()
}

/// Sends `bytes` both ways and compares.
fn ping(records: &mut Records, peer: &mut ClientConnection, bytes: usize) {
    let message = pattern(bytes);
    peer.writer().write_all(&message).unwrap();
    let mut buffer = drain(peer);
    let taken = take(records, &mut buffer).unwrap();
    assert!(taken.plain == message && buffer.is_empty() && !taken.closed);
    give(peer, &taken.reply).unwrap();
    give(peer, &sealed(records, &message)).unwrap();
    assert!(received(peer) == message, "{bytes} bytes from the Edge");
}

#[test]
fn every_suite_carries_every_size_both_ways() {
    let ca = Ca::new();
    for suite in SUITES {
        let (mut records, mut peer) = linked(&ca, Some(suite));
        assert_eq!(peer.negotiated_cipher_suite().unwrap().suite(), suite);
        for bytes in [0, 1, 200, 16_383, 16_384] {
            ping(&mut records, &mut peer, bytes);
        }
        let mut buffer = vec![0; 16_385 + 22];
        assert_eq!(
            records.seal(&mut buffer, 16_385),
            Err(TlsError::PlainTooLong { bytes: 16_385 })
        );
        assert_eq!(
            records.seal(&mut buffer[..121], 100),
            Err(TlsError::NoRoom { bytes: 122 })
        );
        ping(&mut records, &mut peer, 1); // neither refusal spent a sequence number
    }
}

#[test]
fn key_updates_of_either_side_keep_both_directions_alive() {
    let ca = Ca::new();
    for suite in SUITES {
        let (mut records, mut peer) = linked(&ca, Some(suite));
        for _ in 0..3 {
            peer.refresh_traffic_keys().unwrap();
            let taken = take(&mut records, &mut drain(&mut peer)).unwrap();
            assert_eq!(
                (taken.controls, taken.plain.len(), taken.reply.len()),
                (1, 0, 27)
            );
            give(&mut peer, &taken.reply).unwrap();
            ping(&mut records, &mut peer, 1_000);
        }
        // with data on both sides of it, in one buffer
        peer.writer().write_all(b"before").unwrap();
        peer.refresh_traffic_keys().unwrap();
        peer.writer().write_all(b"after").unwrap();
        let taken = take(&mut records, &mut drain(&mut peer)).unwrap();
        assert_eq!(taken.plain, b"beforeafter");
        give(&mut peer, &taken.reply).unwrap();
        ping(&mut records, &mut peer, 1_000);
        // ours, with data on both sides of it
        let mut stream = sealed(&mut records, b"old key");
        let mut reply = ReplyBuf::default();
        records.rekey(&mut reply).unwrap();
        stream.extend_from_slice(reply.as_slice());
        stream.extend_from_slice(&sealed(&mut records, b", new key"));
        give(&mut peer, &stream).unwrap();
        assert_eq!(received(&mut peer), b"old key, new key");
        ping(&mut records, &mut peer, 333);
    }
}

#[test]
fn what_a_peer_sends_with_its_finished_is_ours_whatever_the_cut() {
    let ca = Ca::new();
    let node = ca.sign(&Leaf::node(NODE_URI));
    let tls = node_tls(&ca);
    for piece in [usize::MAX, 1, 2, 3, 5, 7, 64, 333, 1_000, 4_096] {
        let mut peer = Peer::node(&node).connection(&ca);
        let established = connect(&tls, &mut peer, piece, |peer| {
            peer.writer().write_all(b"early").unwrap();
            peer.refresh_traffic_keys().unwrap();
            peer.writer().write_all(b" and more").unwrap();
        });
        let mut established = established.unwrap();
        assert_eq!(established.alpn.as_deref(), Some(&b"iop-edge-node/1"[..]));
        assert_eq!(established.peer_certificates, [node.der().to_vec()]);
        let taken = take(&mut established.records, &mut established.left).unwrap();
        assert_eq!(
            (taken.plain.as_slice(), taken.controls),
            (&b"early and more"[..], 1)
        );
        assert!(established.left.is_empty(), "cut at {piece}");
        give(&mut peer, &taken.reply).unwrap();
        ping(&mut established.records, &mut peer, 500);
    }
}

#[test]
fn tickets_of_an_https_handshake_precede_data() {
    let ca = Ca::new();
    let mut peer = Peer::browser().connection(&ca);
    let mut established = connect(&https(&ca), &mut peer, usize::MAX, |_| {}).unwrap();
    assert_eq!(established.alpn.as_deref(), Some(&b"http/1.1"[..]));
    assert!(established.peer_certificates.is_empty());
    assert!(peer.tls13_tickets_received() > 0);
    ping(&mut established.records, &mut peer, 100);
}

/// A stream of data, a KeyUpdate between, and close_notify, cut in two at every byte; then bytewise.
#[test]
fn any_split_of_the_stream_gives_the_same_plaintext() {
    let ca = Ca::new();
    let (records, mut peer) = linked(&ca, None);
    drop(records);
    let make = |peer: &mut ClientConnection| {
        peer.writer().write_all(&pattern(90)).unwrap();
        peer.refresh_traffic_keys().unwrap();
        peer.writer().write_all(&pattern(33)).unwrap();
        peer.send_close_notify();
        drain(peer)
    };
    let bytes = make(&mut peer).len();
    let expected = [pattern(90), pattern(33)].concat();
    for cut in 0..=bytes {
        let (mut records, mut peer) = linked(&ca, None);
        let stream = make(&mut peer);
        assert_eq!(stream.len(), bytes);
        let pieces: Vec<&[u8]> = match cut {
            0 => stream.chunks(1).collect(),
            _ => vec![&stream[..cut], &stream[cut..]],
        };
        let (mut buffer, mut plain, mut closed) = (Vec::new(), Vec::new(), false);
        for piece in pieces {
            buffer.extend_from_slice(piece);
            let taken = take(&mut records, &mut buffer).unwrap();
            plain.extend_from_slice(&taken.plain);
            closed |= taken.closed;
        }
        assert!(
            plain == expected && closed && buffer.is_empty(),
            "cut at {cut}"
        );
    }
}

#[test]
fn plaintext_of_consecutive_records_is_contiguous_and_the_rest_untouched() {
    let ca = Ca::new();
    let (mut records, mut peer) = linked(&ca, None);
    let mut buffer = Vec::new();
    let mut expected = Vec::new();
    for bytes in [1, 16_384, 22, 300, 0, 5] {
        peer.writer().write_all(&pattern(bytes)).unwrap();
        buffer.extend_from_slice(&drain(&mut peer));
        expected.extend_from_slice(&pattern(bytes));
    }
    peer.writer()
        .write_all(b"the next record, in part")
        .unwrap();
    let partial = drain(&mut peer);
    buffer.extend_from_slice(&partial[..20]);
    let (mut at, mut plain_end, mut reply) = (0, 0, ReplyBuf::default());
    while let Opened::Data {
        next,
        plain_end: end,
    } = records
        .open(&mut buffer, at, plain_end, &mut reply)
        .unwrap()
    {
        assert!(end <= next);
        (at, plain_end) = (next, end);
    }
    assert!(buffer[..plain_end] == expected);
    assert_eq!(buffer[at..], partial[..20]);
    assert_eq!(
        records.open(&mut buffer, at, plain_end, &mut reply),
        Ok(Opened::NeedMore)
    );
    // beyond the buffer there is nothing either
    let end = buffer.len();
    assert_eq!(
        records.open(&mut buffer, end, plain_end, &mut reply),
        Ok(Opened::NeedMore)
    );
}

#[test]
fn a_changed_byte_anywhere_is_refused_and_told() {
    let ca = Ca::new();
    let (mut records, mut peer) = linked(&ca, None);
    peer.writer().write_all(b"payload").unwrap();
    let good = drain(&mut peer);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        match (at, take(&mut records, &mut bad)) {
            (0 | 1, Err(TlsError::HeaderMalformed { .. })) => {}
            (3, Err(TlsError::TagMismatch) | Ok(_)) => {} // now longer than what is there
            (2 | 4.., Err(TlsError::TagMismatch)) => {}
            (4, Ok(taken)) if taken.plain.is_empty() => {} // one byte more than there is
            (at, result) => panic!("byte {at}: {result:?}"),
        }
    }
    // a failed record spent no sequence number: the true one still opens
    assert_eq!(
        take(&mut records, &mut good.clone()).unwrap().plain,
        b"payload"
    );
    // and its repetition does not
    let error = take(&mut records, &mut good.clone()).unwrap_err();
    assert_eq!(error, TlsError::TagMismatch);
    let mut reply = ReplyBuf::default();
    records.alert(&error, &mut reply);
    let told = give(&mut peer, reply.as_slice()).unwrap_err();
    assert_eq!(
        told,
        rustls::Error::AlertReceived(rustls::AlertDescription::BadRecordMac)
    );
    assert_eq!(records.seal(&mut [0; 64], 1), Err(TlsError::WriteClosed));
}

#[test]
fn close_notify_ends_each_direction_on_its_own() {
    let ca = Ca::new();
    let (mut records, mut peer) = linked(&ca, None);
    peer.writer().write_all(b"last").unwrap();
    peer.send_close_notify();
    let mut buffer = drain(&mut peer);
    buffer.extend_from_slice(b"junk behind the end is ignored");
    let taken = take(&mut records, &mut buffer).unwrap();
    assert!(taken.closed && taken.plain == b"last");
    let again = take(&mut records, &mut buffer).unwrap();
    assert!(again.closed && again.plain.is_empty() && buffer.is_empty());
    // we may still send
    give(&mut peer, &sealed(&mut records, b"answer")).unwrap();
    assert_eq!(received(&mut peer), b"answer");
    let mut reply = ReplyBuf::default();
    records.close_notify(&mut reply).unwrap();
    peer.read_tls(&mut reply.as_slice()).unwrap();
    assert!(peer.process_new_packets().unwrap().peer_has_closed());
    reply.clear();
    records.close_notify(&mut reply).unwrap();
    records.alert(&TlsError::TagMismatch, &mut reply);
    assert!(reply.is_empty(), "said once");
    assert_eq!(records.rekey(&mut reply), Err(TlsError::WriteClosed));
}

/// A peer whose records hold whatever a test wants, made from a stock client's secrets.
struct Forger {
    key: LessSafeKey,
    iv: [u8; 12],
    sequence: u64,
}

impl Forger {
    fn new(ca: &Ca) -> (Records, Self) {
        let (records, peer) = linked(ca, Some(SUITES[0]));
        let secrets = peer.dangerous_extract_secrets().unwrap();
        let (sequence, ConnectionTrafficSecrets::Aes128Gcm { key, iv }) = secrets.tx else {
            panic!("another suite");
        };
        let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, key.as_ref()).unwrap());
        (
            records,
            Self {
                key,
                iv: iv.as_ref().try_into().unwrap(),
                sequence,
            },
        )
    }

    fn record(&mut self, content: u8, message: &[u8], padding: usize) -> Vec<u8> {
        let mut inner = [message, &[content]].concat();
        inner.resize(inner.len() + padding, 0);
        let [high, low] = u16::try_from(inner.len() + 16).unwrap().to_be_bytes();
        let header = [23, 3, 3, high, low];
        let mut nonce = self.iv;
        for (byte, digit) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= digit;
        }
        self.sequence += 1;
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(header), &mut inner)
            .unwrap();
        [&header[..], &inner].concat()
    }
}

const DATA: u8 = 23;
const HANDSHAKE: u8 = 22;
const ALERT: u8 = 21;

/// Longer than any record's data.
static LONG: [u8; 16_385] = [7; 16_385];

/// Name, content type, content, bytes of padding, error, and the alert for it.
type Misuse = (
    &'static str,
    u8,
    &'static [u8],
    usize,
    TlsError,
    Option<Alert>,
);

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn every_misuse_of_a_record_has_its_error_and_its_alert() {
    use TlsError as E;
    let ca = Ca::new();
    let cases: &[Misuse] = &[
        (
            "a client sends no ticket",
            HANDSHAKE,
            &[4, 0, 0, 1, 0],
            0,
            E::MessageUnexpected { message: 4 },
            Some(Alert::UnexpectedMessage),
        ),
        (
            "no second hello",
            HANDSHAKE,
            &[1, 0, 0, 0],
            0,
            E::MessageUnexpected { message: 1 },
            Some(Alert::UnexpectedMessage),
        ),
        (
            "key update of two bytes",
            HANDSHAKE,
            &[24, 0, 0, 2, 0, 0],
            0,
            E::KeyUpdateMalformed,
            Some(Alert::DecodeError),
        ),
        (
            "key update of 64 KiB",
            HANDSHAKE,
            &[24, 1, 0, 1, 0],
            0,
            E::KeyUpdateMalformed,
            Some(Alert::DecodeError),
        ),
        (
            "request 2",
            HANDSHAKE,
            &[24, 0, 0, 1, 2],
            0,
            E::KeyUpdateUnknown { request: 2 },
            Some(Alert::IllegalParameter),
        ),
        (
            "more under the old key",
            HANDSHAKE,
            &[24, 0, 0, 1, 0, 24],
            0,
            E::KeyUpdateMisplaced,
            Some(Alert::UnexpectedMessage),
        ),
        (
            "empty handshake",
            HANDSHAKE,
            &[],
            3,
            E::ContentEmpty { content_type: 22 },
            Some(Alert::UnexpectedMessage),
        ),
        (
            "empty alert",
            ALERT,
            &[],
            0,
            E::ContentEmpty { content_type: 21 },
            Some(Alert::UnexpectedMessage),
        ),
        (
            "alert of three bytes",
            ALERT,
            &[2, 0, 0],
            0,
            E::AlertMalformed { bytes: 3 },
            Some(Alert::DecodeError),
        ),
        (
            "fatal alert",
            ALERT,
            &[2, 48],
            0,
            E::PeerAlert { description: 48 },
            None,
        ),
        (
            "alert called a warning",
            ALERT,
            &[1, 48],
            0,
            E::PeerAlert { description: 48 },
            None,
        ),
        (
            "protected change_cipher_spec",
            20,
            &[1],
            0,
            E::ContentUnexpected { content_type: 20 },
            Some(Alert::UnexpectedMessage),
        ),
        (
            "padding alone",
            0,
            &[],
            9,
            E::ContentMissing,
            Some(Alert::UnexpectedMessage),
        ),
        (
            "one byte of padding too many",
            DATA,
            &LONG[..16_384],
            1,
            E::RecordTooLong { bytes: 16_386 },
            Some(Alert::RecordOverflow),
        ),
        (
            "one byte of data too many",
            DATA,
            &LONG,
            0,
            E::RecordTooLong { bytes: 16_386 },
            Some(Alert::RecordOverflow),
        ),
    ];
    for &(name, content, message, padding, error, alert) in cases {
        let (mut records, mut forger) = Forger::new(&ca);
        let mut stream = forger.record(DATA, b"ok", 0);
        stream.extend_from_slice(&forger.record(content, message, padding));
        assert_eq!(take(&mut records, &mut stream), Err(error), "{name}");
        assert_eq!(error.alert(), alert, "{name}");
        assert!(!error.to_string().is_empty());
        let mut reply = ReplyBuf::default();
        records.alert(&error, &mut reply);
        assert_eq!(reply.is_empty(), alert.is_none(), "{name}");
    }
}

#[test]
fn headers_out_of_bounds_are_refused_before_their_bytes_arrive() {
    let ca = Ca::new();
    let (mut records, _) = linked(&ca, None);
    for (header, error) in [
        (
            [22, 3, 3, 0, 40],
            TlsError::HeaderMalformed {
                content_type: 22,
                major: 3,
            },
        ),
        (
            [21, 3, 3, 0, 2],
            TlsError::HeaderMalformed {
                content_type: 21,
                major: 3,
            },
        ),
        (
            [23, 2, 3, 0, 40],
            TlsError::HeaderMalformed {
                content_type: 23,
                major: 2,
            },
        ),
        (
            [b'G', b'E', b'T', b' ', b'/'],
            TlsError::HeaderMalformed {
                content_type: 71,
                major: 69,
            },
        ),
        (
            [23, 3, 3, 0x41, 0x01],
            TlsError::RecordTooLong { bytes: 16_641 },
        ),
        ([23, 3, 3, 0, 16], TlsError::RecordTooShort { bytes: 16 }),
    ] {
        assert_eq!(take(&mut records, &mut header.to_vec()), Err(error));
    }
    for header in [[23, 3, 3, 0x41, 0x00], [23, 3, 3, 0, 17]] {
        assert_eq!(
            take(&mut records, &mut header.to_vec()),
            Ok(Taken::default())
        );
    }
}

#[test]
fn padding_is_stripped_and_a_full_inner_record_is_legal() {
    let ca = Ca::new();
    let (mut records, mut forger) = Forger::new(&ca);
    let mut stream = forger.record(DATA, b"padded\0\0", 200);
    stream.extend_from_slice(&forger.record(DATA, &[7; 16_384], 0));
    stream.extend_from_slice(&forger.record(DATA, &[], 16_384));
    stream.extend_from_slice(&forger.record(ALERT, &[1, 90], 0)); // user_canceled
    let taken = take(&mut records, &mut stream).unwrap();
    assert!(taken.plain == [&b"padded\0\0"[..], &[7; 16_384]].concat());
    assert_eq!((taken.controls, taken.closed), (1, false));
}

#[test]
fn a_key_update_may_come_in_parts_but_nothing_may_come_between() {
    let ca = Ca::new();
    let message = [24, 0, 0, 1, 1];
    for cut in 1..5 {
        let (mut records, mut forger) = Forger::new(&ca);
        let mut stream = forger.record(HANDSHAKE, &message[..cut], 0);
        stream.extend_from_slice(&forger.record(HANDSHAKE, &message[cut..], 0));
        let taken = take(&mut records, &mut stream).unwrap();
        assert_eq!((taken.controls, taken.reply.len()), (2, 27), "cut at {cut}");
        for (content, between) in [(DATA, &b"x"[..]), (DATA, b""), (ALERT, &[1, 0])] {
            let (mut records, mut forger) = Forger::new(&ca);
            let mut stream = forger.record(HANDSHAKE, &message[..cut], 0);
            stream.extend_from_slice(&forger.record(content, between, 0));
            assert_eq!(
                take(&mut records, &mut stream),
                Err(TlsError::KeyUpdateMisplaced)
            );
        }
    }
}

#[test]
fn floods_of_records_without_data_end() {
    let ca = Ca::new();
    let (mut records, mut forger) = Forger::new(&ca);
    for _ in 0..3 {
        for _ in 0..DATALESS_RECORDS_MAX {
            take(&mut records, &mut forger.record(DATA, b"", 0)).unwrap();
        }
        take(&mut records, &mut forger.record(DATA, b"!", 0)).unwrap(); // begins a new count
    }
    for _ in 0..DATALESS_RECORDS_MAX {
        take(&mut records, &mut forger.record(DATA, b"", 0)).unwrap();
    }
    let error = take(&mut records, &mut forger.record(DATA, b"", 0));
    assert_eq!(error, Err(TlsError::DatalessFlood));

    let (mut records, mut peer) = linked(&ca, None);
    for round in 0..=DATALESS_RECORDS_MAX {
        peer.refresh_traffic_keys().unwrap();
        match take(&mut records, &mut drain(&mut peer)) {
            Ok(taken) if round < DATALESS_RECORDS_MAX => give(&mut peer, &taken.reply).unwrap(),
            Err(TlsError::DatalessFlood) if round == DATALESS_RECORDS_MAX => {}
            other => panic!("key update {round}: {other:?}"),
        }
    }
}

#[test]
fn one_answer_serves_all_requests_that_came_before_it_was_sent() {
    let ca = Ca::new();
    let (mut records, mut peer) = linked(&ca, None);
    let mut buffer = Vec::new();
    for word in ["one", "two", "three", "four"] {
        peer.refresh_traffic_keys().unwrap();
        peer.writer().write_all(word.as_bytes()).unwrap();
        buffer.extend_from_slice(&drain(&mut peer));
    }
    let (mut at, mut plain_end, mut reply) = (0, 0, ReplyBuf::default());
    while at < buffer.len() {
        match records
            .open(&mut buffer, at, plain_end, &mut reply)
            .unwrap()
        {
            Opened::Data {
                next,
                plain_end: end,
            } => (at, plain_end) = (next, end),
            Opened::Control { next } => at = next, // not drained
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(&buffer[..plain_end], b"onetwothreefour");
    assert_eq!(reply.as_slice().len(), 27);
    give(&mut peer, reply.as_slice()).unwrap();
    ping(&mut records, &mut peer, 100);
}

#[test]
fn an_undrained_reply_is_an_error_of_ours_not_a_lost_record() {
    let ca = Ca::new();
    let (mut records, _) = linked(&ca, None);
    let mut reply = ReplyBuf::default();
    records.rekey(&mut reply).unwrap();
    records.rekey(&mut reply).unwrap();
    assert_eq!(
        records.rekey(&mut reply),
        Err(TlsError::NoRoom { bytes: 27 })
    );
    assert_eq!(reply.as_slice().len(), 54);
}

#[test]
fn opening_and_sealing_records_calls_no_heap() {
    let ca = Ca::new();
    for suite in SUITES {
        let (mut records, mut peer) = linked(&ca, Some(suite));
        let mut buffer = Vec::new();
        for _ in 0..200 {
            peer.writer().write_all(&pattern(256)).unwrap();
            buffer.extend_from_slice(&drain(&mut peer));
        }
        let (mut at, mut plain_end, mut reply) = (0, 0, ReplyBuf::default());
        let (calls, opened) = heap_calls(|| {
            let mut opened = 0;
            while let Ok(Opened::Data {
                next,
                plain_end: end,
            }) = records.open(&mut buffer, at, plain_end, &mut reply)
            {
                (at, plain_end) = (next, end);
                opened += 1;
            }
            opened
        });
        assert_eq!((calls, opened, plain_end), (0, 200, 200 * 256));
        let mut send = vec![0; 16_384 + 22];
        let (calls, sealed) = heap_calls(|| {
            (0..200)
                .filter(|_| records.seal(&mut send, 16_384).is_ok())
                .count()
        });
        assert_eq!((calls, sealed), (0, 200));
        // the counter counts: a new key is allowed its heap
        let (calls, rekeyed) = heap_calls(|| records.rekey(&mut reply));
        assert!(calls > 0 && rekeyed.is_ok());
    }
}

#[test]
fn debug_output_holds_no_key() {
    let ca = Ca::new();
    let (records, peer) = linked(&ca, Some(SUITES[0]));
    let text = format!("{records:?}");
    assert!(
        text.contains("opened_records") && text.len() < 200,
        "{text}"
    );
    let secrets = peer.dangerous_extract_secrets().unwrap();
    let (_, ConnectionTrafficSecrets::Aes128Gcm { key, .. }) = secrets.rx else {
        panic!()
    };
    assert!(!text.contains(&format!("{:?}", key.as_ref())));
    assert_eq!(size_of::<Records>(), size_of::<usize>());
}

/// A real `openssl s_client`: lines echoed, a KeyUpdate that asks for ours (its command `K`), and one
/// of ours between two lines.
#[test]
fn openssl_s_client_is_served() {
    let ca = Ca::new();
    let node = ca.sign(&Leaf::node(NODE_URI));
    let files = Files::new();
    let ca_file = files.write("ca.pem", &ca.pem);
    let cert = files.write("node.pem", &node.cert);
    let key = files.write("node.key", &node.key);
    let tls = node_tls(&ca);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (seen_tx, key_updates) = std::sync::mpsc::channel();
    let edge = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        echo(stream, ServerHandshake::new(&tls).unwrap(), &seen_tx)
    });
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", &address.to_string(), "-tls1_3"])
        .args([
            "-servername",
            "edge.test",
            "-verify_return_error",
            "-alpn",
            "iop-edge-node/1",
        ])
        .args(["-CAfile".as_ref(), ca_file.as_os_str()])
        .args([
            "-cert".as_ref(),
            cert.as_os_str(),
            "-key".as_ref(),
            key.as_os_str(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("openssl is installed");
    let mut input = client.stdin.take().unwrap();
    let mut output = BufReader::new(client.stdout.take().unwrap());
    for word in ["first", "second", "third"] {
        writeln!(input, "{word}").unwrap();
        expect_line(&mut output, word);
        writeln!(input, "K").unwrap();
        // s_client takes a command only from a read of its own
        key_updates.recv_timeout(DEADLINE).unwrap();
    }
    writeln!(input, "Q").unwrap();
    let status = client.wait().unwrap();
    let mut log = String::new();
    client.stderr.unwrap().read_to_string(&mut log).unwrap();
    assert!(status.success(), "{log}");
    assert_eq!(edge.join().unwrap(), 3, "{log}");
}

fn expect_line(output: &mut impl BufRead, word: &str) {
    let mut line = String::new();
    while line.trim_end() != word {
        line.clear();
        assert_ne!(
            output.read_line(&mut line).unwrap(),
            0,
            "no {word} from s_client"
        );
    }
}

/// Echoes lines until close_notify, with a KeyUpdate of its own behind each; tells of each KeyUpdate
/// it gets. Returns the lines.
fn echo(
    mut stream: std::net::TcpStream,
    mut handshake: ServerHandshake,
    key_updates: &std::sync::mpsc::Sender<()>,
) -> usize {
    let mut buffer = vec![0; 4_096];
    let mut established = loop {
        let bytes = stream.read(&mut buffer).unwrap();
        let mut out = Vec::new();
        let done = handshake.read(&buffer[..bytes], &mut out).unwrap();
        if done {
            let established = handshake.establish(&mut out).unwrap();
            stream.write_all(&out).unwrap();
            break established;
        }
        stream.write_all(&out).unwrap();
    };
    let records = &mut established.records;
    let mut pending = established.left;
    let mut lines = 0;
    loop {
        let taken = take(records, &mut pending).unwrap();
        stream.write_all(&taken.reply).unwrap();
        for _ in 0..taken.controls {
            key_updates.send(()).unwrap();
        }
        if !taken.plain.is_empty() {
            lines += taken.plain.iter().filter(|&&byte| byte == b'\n').count();
            stream.write_all(&sealed(records, &taken.plain)).unwrap();
            let mut reply = ReplyBuf::default();
            records.rekey(&mut reply).unwrap();
            stream.write_all(reply.as_slice()).unwrap();
        }
        if taken.closed {
            return lines;
        }
        let bytes = stream.read(&mut buffer).unwrap();
        assert_ne!(bytes, 0, "closed without close_notify");
        pending.extend_from_slice(&buffer[..bytes]);
    }
}
