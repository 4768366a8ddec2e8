//! What a server makes of a stream of records, said a second time and without cryptography: a record
//! is authentic if it is, byte for byte, the one that was sealed for this place.
//!
//! Lives on: one thread. View: one direction of one connection. Bound: the stream.
use std::collections::BTreeMap;

use iop_dataplane::tls::TlsError;
use iop_dataplane::tls::record::DATALESS_RECORDS_MAX;

use super::sealer::{Place, Sent};
use super::{ALERT, DATA, HANDSHAKE, KEY_UPDATE, PLAIN_MAX};

const HEADER: usize = 5;
const CIPHER_BYTES: core::ops::RangeInclusive<usize> = 17..=PLAIN_MAX + 256;
const CLOSE_NOTIFY: u8 = 0;
const USER_CANCELED: u8 = 90;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// More may come.
    #[default]
    Open,
    Closed,
    Failed(TlsError),
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) plain: Vec<u8>,
    /// Key updates of ours.
    pub(crate) replies: usize,
    pub(crate) end: End,
}

#[derive(Default)]
struct Receiver {
    place: Place,
    dataless: u8,
    /// Of a KeyUpdate, taken from earlier records.
    pending: Vec<u8>,
    outcome: Outcome,
}

pub(crate) fn outcome(mut stream: &[u8], sent: &BTreeMap<Place, Sent>) -> Outcome {
    let mut receiver = Receiver::default();
    while receiver.outcome.end == End::Open {
        let step = match whole_record(stream) {
            Ok(None) => break,
            Ok(Some(record)) => {
                stream = &stream[record.len()..];
                receiver.record(record, sent)
            }
            Err(error) => Err(error),
        };
        if let Err(error) = step {
            receiver.outcome.end = End::Failed(error);
        }
    }
    receiver.outcome
}

/// The record at the stream's start if all of it is there; its header is judged as soon as it is.
fn whole_record(stream: &[u8]) -> Result<Option<&[u8]>, TlsError> {
    let Some(&[content_type, major, _, high, low]) = stream.first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let bytes = usize::from(high) << 8 | usize::from(low);
    if (content_type, major) != (DATA, 3) {
        return Err(TlsError::HeaderMalformed {
            content_type,
            major,
        });
    }
    if bytes > *CIPHER_BYTES.end() {
        return Err(TlsError::RecordTooLong { bytes });
    }
    if bytes < *CIPHER_BYTES.start() {
        return Err(TlsError::RecordTooShort { bytes });
    }
    Ok(stream.get(..HEADER + bytes))
}

impl Receiver {
    fn record(&mut self, record: &[u8], all: &BTreeMap<Place, Sent>) -> Result<(), TlsError> {
        let sent = all.get(&self.place).filter(|sent| sent.record == record);
        let sent = sent.ok_or(TlsError::TagMismatch)?;
        self.place.1 += 1;
        if sent.inner_bytes > PLAIN_MAX + 1 {
            return Err(TlsError::RecordTooLong {
                bytes: sent.inner_bytes,
            });
        }
        // A content type of 0 reads as padding behind the message's last byte that is not 0.
        let inner = [sent.message.as_slice(), &[sent.content]].concat();
        let type_at = inner.iter().rposition(|&byte| byte != 0);
        let type_at = type_at.ok_or(TlsError::ContentMissing)?;
        let (message, content) = (&inner[..type_at], inner[type_at]);
        match content {
            DATA if self.pending.is_empty() => self.data(message),
            HANDSHAKE => {
                self.count_dataless()?;
                self.handshake(message)
            }
            _ if !self.pending.is_empty() => Err(TlsError::KeyUpdateMisplaced),
            ALERT => {
                self.count_dataless()?;
                self.alert(message)
            }
            content_type => {
                self.count_dataless()?;
                Err(TlsError::ContentUnexpected { content_type })
            }
        }
    }

    fn data(&mut self, message: &[u8]) -> Result<(), TlsError> {
        if message.is_empty() {
            return self.count_dataless();
        }
        self.dataless = 0;
        self.outcome.plain.extend_from_slice(message);
        Ok(())
    }

    fn count_dataless(&mut self) -> Result<(), TlsError> {
        self.dataless += 1;
        if self.dataless > DATALESS_RECORDS_MAX {
            return Err(TlsError::DatalessFlood);
        }
        Ok(())
    }

    fn alert(&mut self, message: &[u8]) -> Result<(), TlsError> {
        match *message {
            [] => Err(TlsError::ContentEmpty {
                content_type: ALERT,
            }),
            [_, CLOSE_NOTIFY] => {
                self.outcome.end = End::Closed;
                Ok(())
            }
            [_, USER_CANCELED] => Ok(()),
            [_, description] => Err(TlsError::PeerAlert { description }),
            _ => Err(TlsError::AlertMalformed {
                bytes: message.len(),
            }),
        }
    }

    fn handshake(&mut self, message: &[u8]) -> Result<(), TlsError> {
        if message.is_empty() {
            return Err(TlsError::ContentEmpty {
                content_type: HANDSHAKE,
            });
        }
        let all = [self.pending.as_slice(), message].concat();
        if all[0] != KEY_UPDATE[0] {
            return Err(TlsError::MessageUnexpected { message: all[0] });
        }
        if all.iter().zip(&KEY_UPDATE).any(|(a, b)| a != b) {
            return Err(TlsError::KeyUpdateMalformed);
        }
        match all[..] {
            [_, _, _, _, request] if request > 1 => Err(TlsError::KeyUpdateUnknown { request }),
            [_, _, _, _, request] => {
                self.place = (self.place.0 + 1, 0);
                self.outcome.replies += usize::from(request);
                self.pending.clear();
                Ok(())
            }
            [_, _, _, _, _, ..] => Err(TlsError::KeyUpdateMisplaced),
            _ => {
                self.pending = all;
                Ok(())
            }
        }
    }
}
