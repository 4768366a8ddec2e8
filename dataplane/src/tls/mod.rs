//! TLS 1.3 of the Edge: handshakes by rustls, records by ourselves. The one folder that names rustls.
//!
//! Lives on: handshakes on the front, records on the shard that owns the socket. View: one
//! connection. Bound: see the files.
//!
//! ```text
//! front: ServerHandshake --one record at a time--> Established ──► shard: Records
//!                                                  keys, certificates, bytes rustls never saw
//! ```
use core::ops::{Deref, DerefMut};

use rustls::ExtractedSecrets;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;

pub mod handshake;
pub mod identity;
pub mod record;

pub use handshake::{Established, HandshakeError, PkiError, ServerHandshake, ServerTls};
pub use record::{Alert, Opened, ReplyBuf, TlsError};

/// Record protection of one established connection: a pointer in its owner's slot, the keys (about
/// 1.5 KiB) behind it. Methods: [`record::Protection`].
#[derive(Debug)]
pub struct Records(Box<record::Protection>);

impl Records {
    fn new(
        traffic: ExtractedSecrets,
        secrets: KernelConnection<ServerConnectionData>,
    ) -> Result<Self, TlsError> {
        record::Protection::new(traffic, secrets).map(|protection| Self(Box::new(protection)))
    }
}

impl Deref for Records {
    type Target = record::Protection;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Records {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::server::UnbufferedServerConnection;
    use rustls::unbuffered::{ConnectionState, UnbufferedStatus};

    use super::*;
    use rustls::client::UnbufferedClientConnection;

    /// Both ends of a handshake in memory, as far as the server's secrets.
    fn records() -> Records {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["edge.test".to_owned()]).unwrap();
        let cert = params.self_signed(&key).unwrap().der().clone();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.clone()], key.serialize_der().try_into().unwrap())
            .unwrap();
        server.enable_secret_extraction = true;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(cert).unwrap();
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "edge.test".try_into().unwrap();
        let mut client = UnbufferedClientConnection::new(Arc::new(client), name).unwrap();
        let mut server = UnbufferedServerConnection::new(Arc::new(server)).unwrap();
        let (mut to_server, mut to_client) = (Vec::new(), Vec::new());
        macro_rules! turn {
            ($side:ident, $input:ident, $output:ident) => {
                loop {
                    let UnbufferedStatus { discard, state } =
                        $side.process_tls_records(&mut $input);
                    let done = match state.unwrap() {
                        ConnectionState::EncodeTlsData(mut data) => {
                            let mut flight = [0; 8_192];
                            let bytes = data.encode(&mut flight).unwrap();
                            $output.extend_from_slice(&flight[..bytes]);
                            false
                        }
                        ConnectionState::TransmitTlsData(data) => {
                            data.done();
                            false
                        }
                        _ => true,
                    };
                    $input.drain(..discard);
                    if done {
                        break;
                    }
                }
            };
        }
        while client.is_handshaking() || server.is_handshaking() {
            turn!(client, to_client, to_server);
            turn!(server, to_server, to_client);
        }
        let (traffic, secrets) = server.dangerous_into_kernel_connection().unwrap();
        Records::new(traffic, secrets).unwrap()
    }

    #[test]
    fn a_sealing_key_is_asked_to_go_in_time_and_refuses_when_spent() {
        let mut records = records();
        let mut buffer = [0; 64];
        assert!(!records.needs_rekey());
        records.spend_seals(1);
        assert!(records.needs_rekey());
        assert!(records.seal(&mut buffer, 1).is_ok());
        assert_eq!(records.seal(&mut buffer, 1), Err(TlsError::KeyExhausted));
        // The announcement itself still fits: control records are few and the limit has a margin.
        let mut reply = ReplyBuf::default();
        records.rekey(&mut reply).unwrap();
        assert_eq!(reply.as_slice().len(), 27);
        assert!(
            records.seal(&mut buffer, 1).is_ok(),
            "the next key begins at 0"
        );
    }
}
