//! Managed provider credentials at the Edge: where they rest, and how one leaves for its node.
//!
//! Lives on: the issuer thread (cold); shards hold the ends of its lanes. View: one configuration and
//! its store. Bound: `SLOTS_MAX` slots; a lease takes one signature and one sealing.
//!
//! | file | holds |
//! |---|---|
//! | `store` | the encrypted file of slots |
//! | `plane` | which slot a selection needs, and the lease for it |
//! | `issuer` | the thread, and the lanes between it and the shards |
//!
//! Plaintext is in the store's memory and nowhere else at the Edge: it is sealed before anything of
//! it leaves the issuer thread.
pub mod issuer;
pub mod plane;
pub mod store;

use core::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

/// A key file is one line.
const KEY_FILE_BYTES_MAX: u64 = 4 * 1024;

/// Where a secret key comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    File(PathBuf),
    /// A variable of this process's environment.
    Environment(String),
    /// A file in `$CREDENTIALS_DIRECTORY` (systemd `LoadCredential=`).
    Systemd(String),
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => write!(f, "the environment variable {name}"),
            Self::Systemd(name) => write!(f, "the systemd credential {name}"),
        }
    }
}

impl KeySource {
    /// The key's text, whatever it says.
    ///
    /// # Errors
    /// It is not there, is not text, or is longer than a key.
    pub fn read(&self) -> io::Result<Zeroizing<String>> {
        match self {
            Self::File(path) => read_key(path),
            Self::Environment(name) => {
                std::env::var(name)
                    .map(Zeroizing::new)
                    .map_err(|error| match error {
                        std::env::VarError::NotPresent => io::Error::other("is not set"),
                        std::env::VarError::NotUnicode(_) => io::Error::other("is not text"),
                    })
            }
            Self::Systemd(name) => {
                let directory = std::env::var_os("CREDENTIALS_DIRECTORY");
                let directory = directory
                    .ok_or_else(|| io::Error::other("CREDENTIALS_DIRECTORY is not set"))?;
                read_key(&Path::new(&directory).join(name))
            }
        }
    }
}

/// A key file's text.
///
/// # Errors
/// It cannot be read, is not text, or is longer than a key.
pub fn read_key(path: &Path) -> io::Result<Zeroizing<String>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(256));
    File::open(path)?
        .take(KEY_FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    let text = core::str::from_utf8(&bytes).ok();
    let text = text.filter(|text| text.len() as u64 <= KEY_FILE_BYTES_MAX);
    let text = text.ok_or_else(|| io::Error::other("is not a key file"))?;
    Ok(Zeroizing::new(text.to_owned()))
}
