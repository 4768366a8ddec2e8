//! The store: every slot of an Edge in one encrypted file.
//!
//! Lives on: the issuer thread, `iop credential`. View: one file, whole. Bound: `SLOTS_MAX` slots,
//! `STORE_BYTES_MAX` bytes.
//!
//! ```text
//!  0          8         12           20       32                     n-16    n    bytes
//!  +----------+---------+------------+--------+----------------------+-------+
//!  | IOPSTORE | version | generation | nonce  | ciphertext           | tag   |    integers big-endian
//!  +----------+---------+------------+--------+----------------------+-------+
//!   \__________ associated data _____________/   AES-256-GCM
//! ```
//! Under the encryption: the number of slots, then per slot its four names, its two revisions and its
//! secret, each behind its u32 length. A revision is the generation in which that part was written,
//! so none is ever used twice. Names are encrypted too: who has the file alone learns sizes.
use core::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use iop_lease::StoreKey;
use iop_proto::limits::{NAME_BYTES_MAX, SECRET_BYTES_MAX, SLOTS_MAX, STORE_BYTES_MAX};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use zeroize::Zeroizing;

const MAGIC: &[u8; 8] = b"IOPSTORE";
const VERSION: u32 = 1;
const NONCE_AT: usize = 8 + 4 + 8;
const HEAD_BYTES: usize = NONCE_AT + NONCE_LEN;
const FILE_MODE: u32 = 0o600;

/// One credential and what it is for. Printed without the credential.
#[derive(Clone)]
pub struct Slot {
    /// Whose requests use it: a principal of `keys`.
    pub principal: String,
    /// Its name, unique for the principal.
    pub name: String,
    /// The model whose requests use it.
    pub route: String,
    /// Id of the protocol profile it goes to.
    pub profile: String,
    /// Generation in which the credential was written.
    pub credential_revision: u64,
    /// Generation in which route and profile were.
    pub route_revision: u64,
    pub secret: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("principal", &self.principal)
            .field("name", &self.name)
            .field("route", &self.route)
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

/// All slots of one generation.
#[derive(Debug, Default)]
pub struct Store {
    /// Counts the changes of the file: 0 before the first.
    generation: u64,
    slots: Vec<Slot>,
}

/// Why there is no store, or no change to it. Nothing of a secret is repeated.
#[derive(Debug)]
pub enum StoreError {
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Longer than `STORE_BYTES_MAX`.
    TooLong {
        path: PathBuf,
    },
    /// Not a store, or cut short.
    NotAStore {
        path: PathBuf,
    },
    Version {
        path: PathBuf,
        found: u32,
    },
    /// Another key, or the file was altered.
    Sealed {
        path: PathBuf,
    },
    /// Decrypted, and still not a store: a bug of whoever wrote it.
    Content {
        path: PathBuf,
    },
    Full,
    /// The principal has a slot of this name.
    SlotExists {
        principal: String,
        name: String,
    },
    /// Another slot answers for the same principal, route and profile.
    RouteTaken {
        name: String,
    },
    NoSuchSlot {
        principal: String,
        name: String,
    },
    /// Empty, too long, or with characters that cannot stand in a header.
    Secret,
    /// Empty, too long, or with control characters.
    Name {
        what: &'static str,
    },
    Random,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { what, path, source } => write!(f, "{what} {}: {source}", path.display()),
            Self::TooLong { path } => write!(
                f,
                "{} is longer than {STORE_BYTES_MAX} bytes",
                path.display()
            ),
            Self::NotAStore { path } => write!(f, "{} is no credential store", path.display()),
            Self::Version { path, found } => write!(
                f,
                "{} is a store of version {found}; this program knows {VERSION}",
                path.display()
            ),
            Self::Sealed { path } => write!(
                f,
                "{} cannot be decrypted: another key, or the file was altered",
                path.display()
            ),
            Self::Content { path } => write!(f, "{} holds no slots", path.display()),
            Self::Full => write!(
                f,
                "the store is full: {SLOTS_MAX} slots, {STORE_BYTES_MAX} bytes"
            ),
            Self::SlotExists { principal, name } => write!(
                f,
                "{principal} has a slot {name}; rotate it, or remove it first"
            ),
            Self::RouteTaken { name } => write!(
                f,
                "slot {name} of this principal answers for this route and profile already"
            ),
            Self::NoSuchSlot { principal, name } => write!(f, "{principal} has no slot {name}"),
            Self::Secret => write!(
                f,
                "a credential is 1 to {SECRET_BYTES_MAX} visible ASCII characters, nothing else"
            ),
            Self::Name { what } => write!(
                f,
                "the {what} must be 1 to {NAME_BYTES_MAX} bytes without control characters"
            ),
            Self::Random => f.write_str("the system gives no random bytes"),
        }
    }
}

impl std::error::Error for StoreError {}

impl Store {
    /// Reads and decrypts a store.
    ///
    /// # Errors
    /// The file as a whole; nothing of it is used then.
    pub fn load(path: &Path, key: &StoreKey) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Io {
            what: "cannot read",
            path: path.to_owned(),
            source,
        };
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(failed)?;
        file.take(STORE_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        let path = || path.to_owned();
        if bytes.len() as u64 > STORE_BYTES_MAX {
            return Err(StoreError::TooLong { path: path() });
        }
        let generation = head(&bytes).map_err(|fault| match fault {
            None => StoreError::NotAStore { path: path() },
            Some(found) => StoreError::Version {
                path: path(),
                found,
            },
        })?;
        let body = unseal(bytes, key).ok_or_else(|| StoreError::Sealed { path: path() })?;
        let slots = decode(&body).ok_or_else(|| StoreError::Content { path: path() })?;
        Ok(Self { generation, slots })
    }

    /// Applies one change to the file, whole or not at all; whoever else changes it waits. A store
    /// that is not there yet is made.
    ///
    /// # Errors
    /// The file is as it was, unless it is the sync of its directory that failed.
    pub fn change(
        path: &Path,
        key: &StoreKey,
        change: impl FnOnce(&mut Self) -> Result<(), StoreError>,
    ) -> Result<Self, StoreError> {
        let lock = path.with_added_extension("lock");
        let failed = |source| StoreError::Io {
            what: "cannot lock",
            path: lock.clone(),
            source,
        };
        let held = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(FILE_MODE)
            .open(&lock)
            .map_err(failed)?;
        held.lock().map_err(failed)?;
        let mut store = match Self::load(path, key) {
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Self::default()
            }
            loaded => loaded?,
        };
        store.generation += 1;
        change(&mut store)?;
        store.save(path, key)?;
        Ok(store)
    }

    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The one slot for the caller, the model and the profile of the selected provider. `[R-343]`
    #[must_use]
    pub fn find(&self, principal: &str, route: &str, profile: &str) -> Option<&Slot> {
        self.slots.iter().find(|slot| {
            slot.principal == principal && slot.route == route && slot.profile == profile
        })
    }

    /// Adds a slot under the present generation; its revisions are not looked at.
    ///
    /// # Errors
    /// It names nothing new, or cannot be stored.
    pub fn add(&mut self, slot: Slot) -> Result<(), StoreError> {
        for (what, name) in [
            ("principal", &slot.principal),
            ("slot", &slot.name),
            ("route", &slot.route),
            ("profile", &slot.profile),
        ] {
            let fits = (1..=NAME_BYTES_MAX as usize).contains(&name.len());
            if !fits || name.chars().any(char::is_control) {
                return Err(StoreError::Name { what });
            }
        }
        check_secret(&slot.secret)?;
        if self.row(&slot.principal, &slot.name).is_some() {
            return Err(StoreError::SlotExists {
                principal: slot.principal,
                name: slot.name,
            });
        }
        if let Some(other) = self.find(&slot.principal, &slot.route, &slot.profile) {
            return Err(StoreError::RouteTaken {
                name: other.name.clone(),
            });
        }
        if self.slots.len() >= SLOTS_MAX as usize {
            return Err(StoreError::Full);
        }
        self.slots.push(Slot {
            credential_revision: self.generation,
            route_revision: self.generation,
            ..slot
        });
        Ok(())
    }

    /// Gives a slot another secret.
    ///
    /// # Errors
    /// There is no such slot, or the secret cannot be stored.
    pub fn rotate(
        &mut self,
        principal: &str,
        name: &str,
        secret: Zeroizing<Vec<u8>>,
    ) -> Result<(), StoreError> {
        check_secret(&secret)?;
        let row = self.required(principal, name)?;
        let slot = &mut self.slots[row];
        slot.secret = secret;
        slot.credential_revision = self.generation;
        Ok(())
    }

    /// # Errors
    /// There is no such slot.
    pub fn remove(&mut self, principal: &str, name: &str) -> Result<(), StoreError> {
        let row = self.required(principal, name)?;
        self.slots.remove(row);
        Ok(())
    }

    fn row(&self, principal: &str, name: &str) -> Option<usize> {
        let mut slots = self.slots.iter();
        slots.position(|slot| slot.principal == principal && slot.name == name)
    }

    fn required(&self, principal: &str, name: &str) -> Result<usize, StoreError> {
        self.row(principal, name)
            .ok_or_else(|| StoreError::NoSuchSlot {
                principal: principal.to_owned(),
                name: name.to_owned(),
            })
    }

    fn save(&self, path: &Path, key: &StoreKey) -> Result<(), StoreError> {
        let bytes = self.seal(key)?;
        if bytes.len() as u64 > STORE_BYTES_MAX {
            return Err(StoreError::Full);
        }
        replace(path, &bytes).map_err(|source| StoreError::Io {
            what: "cannot write",
            path: path.to_owned(),
            source,
        })
    }

    fn seal(&self, key: &StoreKey) -> Result<Vec<u8>, StoreError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new()
            .fill(&mut nonce)
            .map_err(|_| StoreError::Random)?;
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_be_bytes());
        head.extend_from_slice(&self.generation.to_be_bytes());
        head.extend_from_slice(&nonce);
        let mut body = self.encode();
        let tag = cipher(key)
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(&head),
                &mut body,
            )
            .map_err(|_| StoreError::Full)?;
        head.extend_from_slice(&body);
        head.extend_from_slice(tag.as_ref());
        Ok(head)
    }

    fn encode(&self) -> Zeroizing<Vec<u8>> {
        let one = |slot: &Slot| {
            slot.parts()
                .iter()
                .map(|part| 4 + part.len())
                .sum::<usize>()
                + 16
        };
        // Sized at once: a buffer that grew would leave copies of secrets behind.
        let size = 4 + self.slots.iter().map(one).sum::<usize>();
        let mut out = Zeroizing::new(Vec::with_capacity(size));
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes();
        out.extend_from_slice(&number(self.slots.len()));
        for slot in &self.slots {
            for part in slot.parts() {
                out.extend_from_slice(&number(part.len()));
                out.extend_from_slice(part);
            }
            out.extend_from_slice(&slot.credential_revision.to_be_bytes());
            out.extend_from_slice(&slot.route_revision.to_be_bytes());
        }
        debug_assert_eq!(out.len(), size, "sized at once");
        out
    }
}

impl Slot {
    fn parts(&self) -> [&[u8]; 5] {
        [
            self.principal.as_bytes(),
            self.name.as_bytes(),
            self.route.as_bytes(),
            self.profile.as_bytes(),
            &self.secret,
        ]
    }
}

fn check_secret(secret: &[u8]) -> Result<(), StoreError> {
    let fits = (1..=SECRET_BYTES_MAX as usize).contains(&secret.len());
    let visible = secret.iter().all(|byte| matches!(byte, 0x21..=0x7e));
    (fits && visible).then_some(()).ok_or(StoreError::Secret)
}

fn cipher(key: &StoreKey) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, key.expose());
    LessSafeKey::new(key.expect("a store key has AES-256's size"))
}

/// The generation; `Err(None)`: no store, `Err(Some(version))`: one of another version.
fn head(bytes: &[u8]) -> Result<u64, Option<u32>> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(None)?;
    let (version, rest) = rest.split_first_chunk().ok_or(None)?;
    let version = u32::from_be_bytes(*version);
    if version != VERSION {
        return Err(Some(version));
    }
    let (generation, _) = rest.split_first_chunk().ok_or(None)?;
    if bytes.len() < HEAD_BYTES + AES_256_GCM.tag_len() {
        return Err(None);
    }
    Ok(u64::from_be_bytes(*generation))
}

/// What is under the encryption of a file whose head was read.
fn unseal(mut bytes: Vec<u8>, key: &StoreKey) -> Option<Zeroizing<Vec<u8>>> {
    let mut body = Zeroizing::new(bytes.split_off(HEAD_BYTES));
    let nonce = Nonce::try_assume_unique_for_key(&bytes[NONCE_AT..]).ok()?;
    let length = cipher(key)
        .open_in_place(nonce, Aad::from(&bytes), &mut body)
        .ok()?
        .len();
    body.truncate(length);
    Some(body)
}

fn decode(mut rest: &[u8]) -> Option<Vec<Slot>> {
    let count = u32::from_be_bytes(*take(&mut rest)?);
    if count > SLOTS_MAX {
        return None;
    }
    let mut slots = Vec::new();
    for _ in 0..count {
        slots.push(Slot {
            principal: text(&mut rest)?,
            name: text(&mut rest)?,
            route: text(&mut rest)?,
            profile: text(&mut rest)?,
            secret: Zeroizing::new(part(&mut rest)?.to_vec()),
            credential_revision: u64::from_be_bytes(*take(&mut rest)?),
            route_revision: u64::from_be_bytes(*take(&mut rest)?),
        });
    }
    rest.is_empty().then_some(slots)
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(head)
}

fn part<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(u32::from_be_bytes(*take(rest)?)).ok()?;
    let (head, tail) = rest.split_at_checked(length)?;
    *rest = tail;
    Some(head)
}

fn text(rest: &mut &[u8]) -> Option<String> {
    String::from_utf8(part(rest)?.to_vec()).ok()
}

/// The file appears whole under its name, or stays what it was; nobody else may read it.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = path.with_added_extension(format!("{}.new", std::process::id()));
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(FILE_MODE)
            .open(&draft)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
        let directory = File::open(directory.unwrap_or_else(|| Path::new(".")))?;
        fs::rename(&draft, path)?;
        directory.sync_all()
    })();
    if written.is_err() {
        // Nothing hangs on it: the draft was renamed, or was never made.
        let _ = fs::remove_file(&draft);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use iop_lease::{KeyKind, secret_text};

    fn key(byte: u8) -> StoreKey {
        StoreKey::parse(&secret_text(KeyKind::StoreSecret, &[byte; 32])).unwrap()
    }

    fn slot(principal: &str, name: &str, route: &str, secret: &str) -> Slot {
        Slot {
            principal: principal.to_owned(),
            name: name.to_owned(),
            route: route.to_owned(),
            profile: "openai".to_owned(),
            credential_revision: 0,
            route_revision: 0,
            secret: Zeroizing::new(secret.as_bytes().to_vec()),
        }
    }

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("iop-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self) -> PathBuf {
            self.0.join("store")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_store_keeps_what_it_was_given_and_counts_its_changes() {
        let scratch = Scratch::new("store-keeps");
        let path = scratch.file();
        let one = Store::change(&path, &key(1), |s| s.add(slot("a", "main", "m1", "sk-one")));
        assert_eq!(one.unwrap().generation(), 1);
        Store::change(&path, &key(1), |s| {
            s.add(slot("a", "other", "m2", "sk-two"))
        })
        .unwrap();
        let secret = Zeroizing::new(b"sk-three".to_vec());
        Store::change(&path, &key(1), |s| s.rotate("a", "main", secret)).unwrap();
        let store = Store::load(&path, &key(1)).unwrap();
        assert_eq!(store.generation(), 3);
        let main = store.find("a", "m1", "openai").unwrap();
        assert_eq!((main.credential_revision, main.route_revision), (3, 1));
        assert_eq!(&**main.secret, b"sk-three");
        assert_eq!(
            store.find("a", "m2", "openai").unwrap().credential_revision,
            2
        );
        for (principal, route, profile) in [
            ("b", "m1", "openai"),
            ("a", "m3", "openai"),
            ("a", "m1", "azure"),
        ] {
            assert!(store.find(principal, route, profile).is_none());
        }
        Store::change(&path, &key(1), |s| s.remove("a", "main")).unwrap();
        let store = Store::load(&path, &key(1)).unwrap();
        assert!(store.find("a", "m1", "openai").is_none());
        assert_eq!(store.slots().len(), 1);
        let mode = fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_refused_change_leaves_the_file_as_it_was() {
        let scratch = Scratch::new("store-refuses");
        let path = scratch.file();
        Store::change(&path, &key(1), |s| s.add(slot("a", "main", "m1", "sk-one"))).unwrap();
        let before = fs::read(&path).unwrap();
        let long = "x".repeat(SECRET_BYTES_MAX as usize + 1);
        let refused: [(Slot, &str); 8] = [
            (slot("a", "main", "m2", "sk"), "rotate it"),
            (
                slot("a", "second", "m1", "sk"),
                "slot main of this principal",
            ),
            (slot("a", "x", "m2", ""), "visible ASCII"),
            (slot("a", "x", "m2", "two words"), "visible ASCII"),
            (slot("a", "x", "m2", "line\n"), "visible ASCII"),
            (slot("a", "x", "m2", &long), "visible ASCII"),
            (slot("", "x", "m2", "sk"), "the principal must"),
            (slot("a", "x", "m\n2", "sk"), "the route must"),
        ];
        for (slot, expected) in refused {
            let error = Store::change(&path, &key(1), |s| s.add(slot)).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = Store::change(&path, &key(1), |s| s.remove("a", "gone")).unwrap_err();
        assert_eq!(error.to_string(), "a has no slot gone");
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn a_store_shows_no_name_and_no_secret_and_opens_with_its_key_alone() {
        let scratch = Scratch::new("store-seals");
        let path = scratch.file();
        let canary = "sk-canary-0123456789";
        Store::change(&path, &key(1), |s| {
            s.add(slot("principal-x", "main", "m1", canary))
        })
        .unwrap();
        let bytes = fs::read(&path).unwrap();
        for text in [canary, "principal-x"] {
            assert!(
                !bytes
                    .windows(text.len())
                    .any(|part| part == text.as_bytes())
            );
        }
        let shown = format!("{:?}", Store::load(&path, &key(1)).unwrap());
        assert!(
            shown.contains("principal-x") && !shown.contains("canary"),
            "{shown}"
        );
        let other = Store::load(&path, &key(2)).unwrap_err();
        assert!(matches!(other, StoreError::Sealed { .. }), "{other}");
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &flipped).unwrap();
            assert!(Store::load(&path, &key(1)).is_err(), "bit {bit}");
        }
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            let error = Store::load(&path, &key(1)).unwrap_err();
            let expected = length < HEAD_BYTES + 16;
            let is_none = matches!(error, StoreError::NotAStore { .. });
            assert_eq!(is_none, expected, "cut at {length}: {error}");
        }
    }
}
