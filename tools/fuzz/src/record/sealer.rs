//! A peer that seals any record under the client's traffic keys, derived here a second time.
//!
//! Lives on: one thread. View: one connection's client side. Bound: the script's records.
use std::collections::BTreeMap;

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use ring::hkdf::{self, HKDF_SHA256, HKDF_SHA384, KeyType, Prk};
use rustls::CipherSuite;

/// Which record it was: key updates before it, and records under its key before it.
pub(crate) type Place = (u32, u64);

/// A record as it was sealed.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) record: Vec<u8>,
    pub(crate) content: u8,
    pub(crate) message: Vec<u8>,
    /// Message, content type and padding, bytes.
    pub(crate) inner_bytes: usize,
}

#[derive(Clone, Copy)]
struct Suite {
    aead: &'static Algorithm,
    hash: hkdf::Algorithm,
}

pub(crate) struct Sealer {
    suite: Suite,
    secret: Vec<u8>,
    key: LessSafeKey,
    iv: [u8; 12],
    place: Place,
    sent: BTreeMap<Place, Sent>,
}

struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// HKDF-Expand-Label without context (RFC 8446 §7.1).
fn expand(suite: Suite, secret: &[u8], label: &str, out: &mut [u8]) {
    let length = u16::try_from(out.len()).expect("a short key").to_be_bytes();
    let label_bytes = u8::try_from(6 + label.len()).expect("a short label");
    let info = [
        &length[..],
        &[label_bytes],
        b"tls13 ",
        label.as_bytes(),
        &[0],
    ];
    Prk::new_less_safe(suite.hash, secret)
        .expand(&info, Bytes(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("keys are shorter than HKDF's limit");
}

fn keys(suite: Suite, secret: &[u8]) -> (LessSafeKey, [u8; 12]) {
    let (mut key, mut iv) = (vec![0; suite.aead.key_len()], [0; 12]);
    expand(suite, secret, "key", &mut key);
    expand(suite, secret, "iv", &mut iv);
    let key = UnboundKey::new(suite.aead, &key).expect("a key of its length");
    (LessSafeKey::new(key), iv)
}

impl Sealer {
    /// `secret`: the client's first application traffic secret.
    pub(crate) fn new(suite: CipherSuite, secret: Vec<u8>) -> Self {
        let suite = match suite {
            CipherSuite::TLS13_AES_128_GCM_SHA256 => Suite {
                aead: &AES_128_GCM,
                hash: HKDF_SHA256,
            },
            CipherSuite::TLS13_AES_256_GCM_SHA384 => Suite {
                aead: &AES_256_GCM,
                hash: HKDF_SHA384,
            },
            _ => Suite {
                aead: &CHACHA20_POLY1305,
                hash: HKDF_SHA256,
            },
        };
        let (key, iv) = keys(suite, &secret);
        Self {
            suite,
            secret,
            key,
            iv,
            place: (0, 0),
            sent: BTreeMap::new(),
        }
    }

    pub(crate) const fn sent(&self) -> &BTreeMap<Place, Sent> {
        &self.sent
    }

    pub(crate) fn record(&mut self, content: u8, message: &[u8], padding: usize) -> Vec<u8> {
        let mut inner = [message, &[content]].concat();
        inner.resize(inner.len() + padding, 0);
        let inner_bytes = inner.len();
        let [high, low] = u16::try_from(inner_bytes + 16)
            .expect("a record's length")
            .to_be_bytes();
        let header = [super::DATA, 3, 3, high, low];
        let mut nonce = self.iv;
        for (byte, digit) in nonce[4..].iter_mut().zip(self.place.1.to_be_bytes()) {
            *byte ^= digit;
        }
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(header), &mut inner)
            .expect("a short record");
        let record = [&header[..], &inner].concat();
        let sent = Sent {
            record: record.clone(),
            content,
            message: message.to_vec(),
            inner_bytes,
        };
        self.sent.insert(self.place, sent);
        self.place.1 += 1;
        record
    }

    /// A KeyUpdate was sealed: what follows is under the next key. One that asks for nonsense updates
    /// nothing.
    pub(crate) fn update(&mut self, request: u8) {
        if request > 1 {
            return;
        }
        let mut next = vec![0; self.secret.len()];
        expand(self.suite, &self.secret, "traffic upd", &mut next);
        (self.key, self.iv) = keys(self.suite, &next);
        self.secret = next;
        self.place = (self.place.0 + 1, 0);
    }
}
