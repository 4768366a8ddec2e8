//! HOT. Protection of one server-side TLS 1.3 connection after its handshake (RFC 8446 §5): opens
//! records in the receive buffer, seals them in the send buffer, answers KeyUpdate, ends with alerts.
//!
//! Lives on: the shard that owns the socket. View: one connection. Bound: no heap per record, two
//! keys and a few counters per connection, `DATALESS_RECORDS_MAX` records in a row without data.
//!
//! ```text
//! buffer   plaintext so far        | gap | header | ciphertext, tag        | next record …
//!          0 .. plain_end                ^ record_at                       ^ next
//! opened   plaintext so far, plaintext   |                       rest is spent
//!          0 ........................... plain_end'        plain_end' <= next - 22
//! ```
//!
//! The plaintext of consecutive records is contiguous: each record is opened to the end of the
//! plaintext before it. Relations: `plain_end <= record_at <= buffer.len()`.
use core::fmt;

use iop_proto::limits::{
    RECORD_CIPHER_BYTES_MAX, RECORD_EXTRA_BYTES, RECORD_HEADER_BYTES, RECORD_PLAIN_BYTES_MAX,
};
use iop_proto::reason::Reason;
use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};
use zeroize::Zeroize;

/// Bytes of a record before its ciphertext.
pub const HEADER: usize = RECORD_HEADER_BYTES as usize;
/// Bytes a sealed record is longer than its plaintext: header, inner content type, tag.
pub const EXTRA: usize = RECORD_EXTRA_BYTES as usize;
/// Longest plaintext of one record.
pub const PLAIN_MAX: usize = RECORD_PLAIN_BYTES_MAX as usize;
const CIPHER_MAX: usize = RECORD_CIPHER_BYTES_MAX as usize;
const TAG: usize = 16;
/// Shortest ciphertext: inner content type and tag.
const CIPHER_MIN: usize = 1 + TAG;
const LEGACY_VERSION_MAJOR: u8 = 3;

const CONTENT_ALERT: u8 = 21;
const CONTENT_HANDSHAKE: u8 = 22;
const CONTENT_DATA: u8 = 23;

const MESSAGE_KEY_UPDATE: u8 = 24;
/// Type, 24-bit length, `request_update`.
const KEY_UPDATE_BYTES: u8 = 5;

const ALERT_LEVEL_WARNING: u8 = 1;
const ALERT_LEVEL_FATAL: u8 = 2;

/// Records in a row that carry no application data (KeyUpdate, empty data, ignored alerts): as many
/// as stock stacks allow, few enough that a flood costs its sender more than us.
pub const DATALESS_RECORDS_MAX: u8 = 32;
/// Records left under a sealing key when [`Protection::needs_rekey`] begins to ask for the next one:
/// far more than one turn of a shard can seal.
const REKEY_MARGIN_RECORDS: u64 = 1 << 16;

/// Alert descriptions we send (RFC 8446 §6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Alert {
    CloseNotify = 0,
    UnexpectedMessage = 10,
    BadRecordMac = 20,
    RecordOverflow = 22,
    IllegalParameter = 47,
    AccessDenied = 49,
    DecodeError = 50,
    InternalError = 80,
    NoApplicationProtocol = 120,
}

/// Why a record could not be opened or sealed. After an error from `open` the connection is over:
/// send [`Protection::alert`] and close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsError {
    /// The five bytes at a record's start are not an application-data record of TLS 1.2 or later.
    HeaderMalformed { content_type: u8, major: u8 },
    /// Announced ciphertext is shorter than content type and tag.
    RecordTooShort { bytes: usize },
    /// Announced ciphertext or inner plaintext is over its limit (RFC 8446 §5.2, §5.4).
    RecordTooLong { bytes: usize },
    /// The tag does not match: tampered, reordered, or another key.
    TagMismatch,
    /// A record of padding alone.
    ContentMissing,
    /// A protected record of a type that has no place after the handshake.
    ContentUnexpected { content_type: u8 },
    /// An empty handshake or alert record.
    ContentEmpty { content_type: u8 },
    /// A handshake message that a client may not send now.
    MessageUnexpected { message: u8 },
    /// A KeyUpdate whose length is not one byte.
    KeyUpdateMalformed,
    /// A KeyUpdate that asks for neither "not requested" nor "requested".
    KeyUpdateUnknown { request: u8 },
    /// A KeyUpdate followed by more under the key it ends, or interrupted by another content type.
    KeyUpdateMisplaced,
    /// More than [`DATALESS_RECORDS_MAX`] records in a row without data.
    DatalessFlood,
    /// An alert that is not two bytes.
    AlertMalformed { bytes: usize },
    /// The peer ended the connection with this alert.
    PeerAlert { description: u8 },
    /// Ours: plaintext over [`PLAIN_MAX`].
    PlainTooLong { bytes: usize },
    /// Ours: the buffer cannot hold the sealed record, or the reply the record.
    NoRoom { bytes: usize },
    /// Ours: the sealing key is spent; `rekey` was not called in time.
    KeyExhausted,
    /// Ours: close_notify or an alert was sealed already.
    WriteClosed,
    /// Ours: the next traffic key could not be made.
    KeyDerivation,
}

impl TlsError {
    /// The alert the peer is told; `None` when it is told nothing.
    #[must_use]
    pub const fn alert(self) -> Option<Alert> {
        match self {
            Self::HeaderMalformed { .. }
            | Self::ContentMissing
            | Self::ContentUnexpected { .. }
            | Self::ContentEmpty { .. }
            | Self::MessageUnexpected { .. }
            | Self::KeyUpdateMisplaced
            | Self::DatalessFlood => Some(Alert::UnexpectedMessage),
            Self::RecordTooShort { .. }
            | Self::KeyUpdateMalformed
            | Self::AlertMalformed { .. } => Some(Alert::DecodeError),
            Self::KeyUpdateUnknown { .. } => Some(Alert::IllegalParameter),
            Self::RecordTooLong { .. } => Some(Alert::RecordOverflow),
            Self::TagMismatch => Some(Alert::BadRecordMac),
            Self::PeerAlert { .. } | Self::WriteClosed => None,
            Self::PlainTooLong { .. }
            | Self::NoRoom { .. }
            | Self::KeyExhausted
            | Self::KeyDerivation => Some(Alert::InternalError),
        }
    }

    /// Why the connection ends, for metrics and logs.
    #[must_use]
    pub const fn reason(self) -> Reason {
        match self {
            Self::PeerAlert { .. } => Reason::PeerClosed,
            Self::HeaderMalformed { .. }
            | Self::RecordTooShort { .. }
            | Self::RecordTooLong { .. }
            | Self::TagMismatch
            | Self::ContentMissing
            | Self::ContentUnexpected { .. }
            | Self::ContentEmpty { .. }
            | Self::MessageUnexpected { .. }
            | Self::KeyUpdateMalformed
            | Self::KeyUpdateUnknown { .. }
            | Self::KeyUpdateMisplaced
            | Self::DatalessFlood
            | Self::AlertMalformed { .. } => Reason::RecordInvalid,
            Self::PlainTooLong { .. }
            | Self::NoRoom { .. }
            | Self::KeyExhausted
            | Self::WriteClosed
            | Self::KeyDerivation => Reason::SealFailed,
        }
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HeaderMalformed {
                content_type,
                major,
            } => {
                write!(
                    f,
                    "record header: content type {content_type}, major version {major}"
                )
            }
            Self::RecordTooShort { bytes } => write!(f, "record of {bytes} bytes of ciphertext"),
            Self::RecordTooLong { bytes } => write!(f, "record of {bytes} bytes is over its limit"),
            Self::TagMismatch => f.write_str("record tag does not match"),
            Self::ContentMissing => f.write_str("record without content type"),
            Self::ContentUnexpected { content_type } => {
                write!(
                    f,
                    "record of content type {content_type} after the handshake"
                )
            }
            Self::ContentEmpty { content_type } => {
                write!(f, "empty record of content type {content_type}")
            }
            Self::MessageUnexpected { message } => {
                write!(f, "handshake message {message} after the handshake")
            }
            Self::KeyUpdateMalformed => f.write_str("key update of a wrong length"),
            Self::KeyUpdateUnknown { request } => write!(f, "key update with request {request}"),
            Self::KeyUpdateMisplaced => f.write_str("key update not at the end of its record"),
            Self::DatalessFlood => f.write_str("too many records in a row without data"),
            Self::AlertMalformed { bytes } => write!(f, "alert of {bytes} bytes"),
            Self::PeerAlert { description } => write!(f, "alert {description} from the peer"),
            Self::PlainTooLong { bytes } => write!(f, "{bytes} bytes do not fit one record"),
            Self::NoRoom { bytes } => write!(f, "no room for a record of {bytes} bytes"),
            Self::KeyExhausted => f.write_str("sealing key spent"),
            Self::WriteClosed => f.write_str("connection closed for writing"),
            Self::KeyDerivation => f.write_str("next traffic key could not be made"),
        }
    }
}

impl std::error::Error for TlsError {}

/// What one call of `open` did. `next`: where the following record starts in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// No whole record at `record_at`; nothing changed.
    NeedMore,
    /// Application data: plaintext now ends at `plain_end` (unmoved by an empty record).
    Data { next: usize, plain_end: usize },
    /// A record without data was dealt with. `reply` may hold a record: send it before any record
    /// sealed from here on, then clear it. It may wait until the whole buffer is opened.
    Control { next: usize },
    /// close_notify: the peer sends nothing more, and what follows is ignored. We may still send.
    Closed { next: usize },
}

/// Sealed control records on their way to the peer. Drained by the caller after each use.
#[derive(Clone)]
pub struct ReplyBuf {
    bytes: [u8; Self::CAPACITY],
    used: usize,
}

impl ReplyBuf {
    /// A KeyUpdate (27 bytes) and an alert (24) fit together.
    pub const CAPACITY: usize = 64;

    /// Sealed bytes, to be sent as they are.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// The bytes were queued to the socket.
    pub const fn clear(&mut self) {
        self.used = 0;
    }
}

impl Default for ReplyBuf {
    fn default() -> Self {
        Self {
            bytes: [0; Self::CAPACITY],
            used: 0,
        }
    }
}

impl fmt::Debug for ReplyBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplyBuf")
            .field("used", &self.used)
            .finish_non_exhaustive()
    }
}

/// One direction: key, nonce base, and the number of the next record under them.
struct Half {
    key: LessSafeKey,
    iv: [u8; 12],
    sequence: u64,
}

impl Half {
    fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, TlsError> {
        let (algorithm, key, iv): (&'static Algorithm, _, _) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            // The enum is open; the three suites above are all we configure.
            _ => return Err(TlsError::KeyDerivation),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| TlsError::KeyDerivation)?;
        let iv = iv
            .as_ref()
            .try_into()
            .map_err(|_| TlsError::KeyDerivation)?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv,
            sequence,
        })
    }

    /// RFC 8446 §5.3: the sequence number, padded on the left, xor the IV.
    #[inline]
    fn nonce(&self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, digit) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= digit;
        }
        Nonce::assume_unique_for_key(nonce)
    }

    /// Opens the ciphertext that starts at `cipher_at` of `space` and ends with it, to the front of
    /// `space`. Returns content type and bytes of content. The sequence moves only on success.
    #[inline]
    fn open(
        &mut self,
        header: [u8; HEADER],
        space: &mut [u8],
        cipher_at: usize,
    ) -> Result<(u8, usize), TlsError> {
        let plain = self
            .key
            .open_within(self.nonce(), Aad::from(header), space, cipher_at..)
            .map_err(|_| TlsError::TagMismatch)?;
        self.sequence += 1;
        // §5.4: padding counts toward the limit.
        if plain.len() > PLAIN_MAX + 1 {
            return Err(TlsError::RecordTooLong { bytes: plain.len() });
        }
        let Some(type_at) = plain.iter().rposition(|&byte| byte != 0) else {
            return Err(TlsError::ContentMissing);
        };
        Ok((plain[type_at], type_at))
    }

    /// Seals `buffer[HEADER..HEADER + bytes]`; returns the record's whole length.
    #[inline]
    fn seal(&mut self, buffer: &mut [u8], bytes: usize, content: u8) -> Result<usize, TlsError> {
        if bytes > PLAIN_MAX {
            return Err(TlsError::PlainTooLong { bytes });
        }
        let total = bytes + EXTRA;
        let record = buffer
            .get_mut(..total)
            .ok_or(TlsError::NoRoom { bytes: total })?;
        let [high, low] = u16::try_from(total - HEADER)
            .expect("at most PLAIN_MAX + 17")
            .to_be_bytes();
        let header = [CONTENT_DATA, LEGACY_VERSION_MAJOR, 3, high, low];
        record[..HEADER].copy_from_slice(&header);
        let tag_at = HEADER + bytes + 1;
        record[tag_at - 1] = content;
        let tag = self
            .key
            .seal_in_place_separate_tag(
                self.nonce(),
                Aad::from(header),
                &mut record[HEADER..tag_at],
            )
            .map_err(|_| TlsError::PlainTooLong { bytes })?;
        record[tag_at..].copy_from_slice(tag.as_ref());
        self.sequence += 1;
        Ok(total)
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // The AEAD crate keeps its expanded key to itself; the nonce base is ours to clear.
        self.iv.zeroize();
    }
}

/// See the file's head. Held through [`super::Records`].
pub struct Protection {
    rx: Half,
    tx: Half,
    /// Makes the next traffic secrets; touched by KeyUpdate alone.
    secrets: KernelConnection<ServerConnectionData>,
    /// Records the sealing key may protect (2^24 for AES-GCM).
    seal_limit: u64,
    /// Bytes of a KeyUpdate taken from earlier records, `0 .. KEY_UPDATE_BYTES`.
    key_update_bytes: u8,
    /// Records in a row that carried no data.
    dataless: u8,
    read_closed: bool,
    write_closed: bool,
}

impl fmt::Debug for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys, secrets and nonce bases are left out on purpose.
        f.debug_struct("Protection")
            .field("opened_records", &self.rx.sequence)
            .field("sealed_records", &self.tx.sequence)
            .field("read_closed", &self.read_closed)
            .field("write_closed", &self.write_closed)
            .finish_non_exhaustive()
    }
}

impl Protection {
    /// Takes over from the handshake. Front thread.
    ///
    /// # Errors
    /// `KeyDerivation` when the suite is none of the three of TLS 1.3 that we configure.
    pub(super) fn new(
        traffic: ExtractedSecrets,
        secrets: KernelConnection<ServerConnectionData>,
    ) -> Result<Self, TlsError> {
        let suite = secrets
            .negotiated_cipher_suite()
            .tls13()
            .ok_or(TlsError::KeyDerivation)?;
        Ok(Self {
            rx: Half::new(traffic.rx)?,
            tx: Half::new(traffic.tx)?,
            secrets,
            seal_limit: suite.common.confidentiality_limit,
            key_update_bytes: 0,
            dataless: 0,
            read_closed: false,
            write_closed: false,
        })
    }

    /// Opens the record at `record_at` of `buffer` (received bytes, nothing behind them) so that its
    /// plaintext starts at `plain_end`. Bytes of the record itself are spent afterwards.
    ///
    /// # Errors
    /// What the peer did wrong; the buffer's contents from `plain_end` on are then undefined.
    ///
    /// # Panics
    /// When `plain_end > record_at`: the caller would overwrite what it has not read.
    #[inline]
    pub fn open(
        &mut self,
        buffer: &mut [u8],
        record_at: usize,
        plain_end: usize,
        reply: &mut ReplyBuf,
    ) -> Result<Opened, TlsError> {
        assert!(
            plain_end <= record_at,
            "plaintext would run into an unread record"
        );
        if self.read_closed {
            return Ok(Opened::Closed { next: buffer.len() });
        }
        let Some(&header) = buffer.get(record_at..).and_then(|rest| rest.first_chunk()) else {
            return Ok(Opened::NeedMore);
        };
        let cipher_at = record_at + HEADER;
        let next = cipher_at + cipher_bytes(header)?;
        let Some(space) = buffer.get_mut(plain_end..next) else {
            return Ok(Opened::NeedMore);
        };
        let (content, bytes) = self.rx.open(header, space, cipher_at - plain_end)?;
        if content != CONTENT_DATA || self.key_update_bytes != 0 {
            return self.control(next, content, &space[..bytes], reply);
        }
        if bytes == 0 {
            self.count_dataless()?;
        } else {
            self.dataless = 0;
        }
        Ok(Opened::Data {
            next,
            plain_end: plain_end + bytes,
        })
    }

    /// Seals `buffer[5..5 + plain_bytes]` as application data where it stands; the record is
    /// `buffer[..returned]`, [`EXTRA`] bytes longer than the plaintext.
    ///
    /// # Errors
    /// `PlainTooLong`, `NoRoom`, `KeyExhausted`, `WriteClosed`; nothing was sealed then.
    #[inline]
    pub fn seal(&mut self, buffer: &mut [u8], plain_bytes: usize) -> Result<usize, TlsError> {
        if self.write_closed {
            return Err(TlsError::WriteClosed);
        }
        if self.tx.sequence >= self.seal_limit {
            return Err(TlsError::KeyExhausted);
        }
        self.tx.seal(buffer, plain_bytes, CONTENT_DATA)
    }

    /// The sealing key nears its limit: call [`Self::rekey`] this turn.
    #[inline]
    #[must_use]
    pub const fn needs_rekey(&self) -> bool {
        self.tx.sequence >= self.seal_limit.saturating_sub(REKEY_MARGIN_RECORDS)
    }

    /// Announces the next sealing key and moves to it. What was sealed before must be sent before
    /// the reply, what is sealed afterwards behind it. Allocates.
    ///
    /// # Errors
    /// `NoRoom` when `reply` was not drained, `KeyDerivation`, `WriteClosed`.
    #[cold]
    pub fn rekey(&mut self, reply: &mut ReplyBuf) -> Result<(), TlsError> {
        let message = [MESSAGE_KEY_UPDATE, 0, 0, 1, 0];
        self.seal_control(&message, CONTENT_HANDSHAKE, reply)?;
        let next = self
            .secrets
            .update_tx_secret()
            .map_err(|_| TlsError::KeyDerivation)?;
        self.tx = Half::new(next)?;
        Ok(())
    }

    /// Says goodbye, once: nothing can be sealed afterwards. The peer may still send.
    ///
    /// # Errors
    /// `NoRoom` when `reply` was not drained.
    #[cold]
    pub fn close_notify(&mut self, reply: &mut ReplyBuf) -> Result<(), TlsError> {
        self.end(ALERT_LEVEL_WARNING, Alert::CloseNotify, reply)
    }

    /// Tells the peer why the connection ends, if it is told at all. Nothing can be sealed afterwards.
    #[cold]
    pub fn alert(&mut self, error: &TlsError, reply: &mut ReplyBuf) {
        if let Some(alert) = error.alert() {
            self.fatal(alert, reply);
        }
        self.write_closed = true;
    }

    /// Ends the connection with a fatal alert of the caller's choice.
    #[cold]
    pub fn fatal(&mut self, alert: Alert, reply: &mut ReplyBuf) {
        // A full reply loses the alert; the close that follows says enough.
        let _lost = self.end(ALERT_LEVEL_FATAL, alert, reply);
    }

    fn end(&mut self, level: u8, alert: Alert, reply: &mut ReplyBuf) -> Result<(), TlsError> {
        if self.write_closed {
            return Ok(());
        }
        self.seal_control(&[level, alert as u8], CONTENT_ALERT, reply)?;
        self.write_closed = true;
        Ok(())
    }

    fn seal_control(
        &mut self,
        message: &[u8],
        content: u8,
        reply: &mut ReplyBuf,
    ) -> Result<(), TlsError> {
        if self.write_closed {
            return Err(TlsError::WriteClosed);
        }
        let space = &mut reply.bytes[reply.used..];
        let end = HEADER + message.len();
        let plain = space.get_mut(HEADER..end).ok_or(TlsError::NoRoom {
            bytes: message.len() + EXTRA,
        })?;
        plain.copy_from_slice(message);
        reply.used += self.tx.seal(space, message.len(), content)?;
        Ok(())
    }

    fn count_dataless(&mut self) -> Result<(), TlsError> {
        if self.dataless == DATALESS_RECORDS_MAX {
            return Err(TlsError::DatalessFlood);
        }
        self.dataless += 1;
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn control(
        &mut self,
        next: usize,
        content: u8,
        message: &[u8],
        reply: &mut ReplyBuf,
    ) -> Result<Opened, TlsError> {
        // §5.1: nothing may stand between the parts of a split handshake message.
        if self.key_update_bytes != 0 && content != CONTENT_HANDSHAKE {
            return Err(TlsError::KeyUpdateMisplaced);
        }
        self.count_dataless()?;
        match content {
            CONTENT_ALERT => self.take_alert(next, message),
            CONTENT_HANDSHAKE => {
                self.take_handshake(message, reply)?;
                Ok(Opened::Control { next })
            }
            _ => Err(TlsError::ContentUnexpected {
                content_type: content,
            }),
        }
    }

    /// §6: the level says nothing in TLS 1.3; `user_canceled` is followed by `close_notify`.
    fn take_alert(&mut self, next: usize, message: &[u8]) -> Result<Opened, TlsError> {
        const CLOSE_NOTIFY: u8 = 0;
        const USER_CANCELED: u8 = 90;
        match *message {
            [] => Err(TlsError::ContentEmpty {
                content_type: CONTENT_ALERT,
            }),
            [_, CLOSE_NOTIFY] => {
                self.read_closed = true;
                Ok(Opened::Closed { next })
            }
            [_, USER_CANCELED] => Ok(Opened::Control { next }),
            [_, description] => Err(TlsError::PeerAlert { description }),
            _ => Err(TlsError::AlertMalformed {
                bytes: message.len(),
            }),
        }
    }

    /// The one message a client may send now is KeyUpdate, `24, 0, 0, 1, request`. It may be split
    /// over records, so it is matched byte by byte and only its length so far is kept.
    fn take_handshake(&mut self, message: &[u8], reply: &mut ReplyBuf) -> Result<(), TlsError> {
        if message.is_empty() {
            return Err(TlsError::ContentEmpty {
                content_type: CONTENT_HANDSHAKE,
            });
        }
        for (at, &byte) in message.iter().enumerate() {
            match (self.key_update_bytes, byte) {
                (0, MESSAGE_KEY_UPDATE) | (1 | 2, 0) | (3, 1) | (4, _) => {}
                (0, message) => return Err(TlsError::MessageUnexpected { message }),
                _ => return Err(TlsError::KeyUpdateMalformed),
            }
            self.key_update_bytes += 1;
            if self.key_update_bytes == KEY_UPDATE_BYTES {
                if at + 1 != message.len() {
                    return Err(TlsError::KeyUpdateMisplaced);
                }
                self.key_update_bytes = 0;
                return self.take_key_update(byte, reply);
            }
        }
        Ok(())
    }

    /// §4.6.3: the peer's next record is under its next key; an answer goes out under our present
    /// one. One that was not sent yet answers this request too.
    fn take_key_update(&mut self, request: u8, reply: &mut ReplyBuf) -> Result<(), TlsError> {
        if request > 1 {
            return Err(TlsError::KeyUpdateUnknown { request });
        }
        let next = self
            .secrets
            .update_rx_secret()
            .map_err(|_| TlsError::KeyDerivation)?;
        self.rx = Half::new(next)?;
        if request == 1 && !self.write_closed && reply.is_empty() {
            self.rekey(reply)?;
        }
        Ok(())
    }

    /// Lets a test reach the limit of the sealing key.
    #[cfg(test)]
    pub(super) fn spend_seals(&mut self, left: u64) {
        self.seal_limit = self.tx.sequence + left;
    }
}

/// Checks a record's header; returns the bytes that follow it.
#[inline]
fn cipher_bytes(header: [u8; HEADER]) -> Result<usize, TlsError> {
    let [content_type, major, _, high, low] = header;
    if content_type != CONTENT_DATA || major != LEGACY_VERSION_MAJOR {
        return Err(TlsError::HeaderMalformed {
            content_type,
            major,
        });
    }
    let bytes = usize::from(u16::from_be_bytes([high, low]));
    if bytes > CIPHER_MAX {
        return Err(TlsError::RecordTooLong { bytes });
    }
    if bytes < CIPHER_MIN {
        return Err(TlsError::RecordTooShort { bytes });
    }
    Ok(bytes)
}

const _: () = {
    assert!(PLAIN_MAX + EXTRA - HEADER <= u16::MAX as usize);
    assert!(EXTRA == HEADER + CIPHER_MIN);
    // A KeyUpdate and an alert.
    assert!(ReplyBuf::CAPACITY >= KEY_UPDATE_BYTES as usize + 2 + 2 * EXTRA);
};
