//! `iop pki` and `iop key`: a certificate authority of one's own, workload certificates, API keys.
//!
//! Lives on: the main thread of a short command. Bound: a few files of at most `PEM_BYTES_MAX`.
//!
//! ```text
//! DIR/ca.crt 0644   root, spiffe://<trust domain>        ten years, keeps its key in ca.key 0600
//! DIR/NAME.crt 0644 leaf, spiffe://<trust domain>/<role>/<NAME>, 90 days, key in NAME.key 0600
//!
//! DIR/NAME.issuer.key 0600     signs credential leases       NAME.issuer.pub 0644 for nodes
//! DIR/NAME.recipient.key 0600  opens them, on one node       NAME.recipient.pub 0644 for the Edge
//! DIR/NAME.store.key 0600      encrypts the credential store
//! ```
//! Any other issuer of X.509-SVIDs serves as well. `[A-41]` `[D-61]`
use core::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use iop_lease::{IssuerKey, KeyKind, RecipientKey, secret_text};
use iop_proto::limits::{NAME_BYTES_MAX, PEM_BYTES_MAX};
use iop_proto::spiffe::{is_label, is_trust_domain};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};
use time::{Duration, OffsetDateTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::Pem;
use zeroize::Zeroizing;

const DIRECTORY_MODE: u32 = 0o700;
const KEY_MODE: u32 = 0o600;
const CERTIFICATE_MODE: u32 = 0o644;
/// A root outlives many leaves; a leaf is short, for there is no revocation.
const CA_DAYS: u32 = 3650;
const LEAF_DAYS: u32 = 90;
/// A certificate is good for peers whose clocks are this much behind.
const BACKDATED: Duration = Duration::minutes(5);
const API_KEY_BYTES: usize = 32;

#[derive(Subcommand, Debug)]
pub(crate) enum PkiCommand {
    /// Make a certificate authority: ca.crt, and ca.key which signs everything else
    Init(InitArgs),
    /// Make a node agent's certificate and key
    Node(LeafArgs),
    /// Make an Edge's certificate and key
    Edge(LeafArgs),
    /// Make an Edge's key that signs credential leases, and its public half for the nodes
    Issuer(KeyArgs),
    /// Make a node's key that credential leases are sealed to, and its public half for the Edge
    Recipient(KeyArgs),
    /// Make the key that an Edge's credential store is encrypted with
    StoreKey(KeyArgs),
    /// Print what certificate files say; keys are never printed
    Show(ShowArgs),
}

#[derive(Args, Debug)]
pub(crate) struct InitArgs {
    /// Where the files go; made if it is not there
    #[arg(long, default_value = "pki")]
    pub(crate) dir: PathBuf,
    /// First part of every identity, spiffe://TRUST_DOMAIN/…
    #[arg(long)]
    pub(crate) trust_domain: String,
    /// Days the authority is valid
    #[arg(long, default_value_t = CA_DAYS, value_parser = clap::value_parser!(u32).range(1..=7300))]
    pub(crate) days: u32,
    /// Replace an authority: nothing it has signed is accepted any more
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
pub(crate) struct LeafArgs {
    /// The name its certificate carries and its files have
    pub(crate) name: String,
    /// Where ca.crt and ca.key are and the files go
    #[arg(long, default_value = "pki")]
    pub(crate) dir: PathBuf,
    /// Days the certificate is valid
    #[arg(long, default_value_t = LEAF_DAYS, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub(crate) days: u32,
    /// Replace files of the same name
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    /// First part of its files' names
    pub(crate) name: String,
    /// Where the files go; made if it is not there
    #[arg(long, default_value = "pki")]
    pub(crate) dir: PathBuf,
    /// Replace files of the same name: what was signed, sealed or encrypted with them is lost
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    /// PEM files
    #[arg(required = true)]
    pub(crate) files: Vec<PathBuf>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum KeyCommand {
    /// Make a random API key: printed once, with the hash that edge.yaml wants beside it
    New {
        /// Whose key it is, for the printed entry
        #[arg(long, default_value = "client")]
        principal: String,
    },
}

/// What a workload certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Edge,
    Node,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Self::Edge => "edge",
            Self::Node => "node",
        }
    }

    const fn purpose(self) -> ExtendedKeyUsagePurpose {
        match self {
            Self::Edge => ExtendedKeyUsagePurpose::ServerAuth,
            Self::Node => ExtendedKeyUsagePurpose::ClientAuth,
        }
    }
}

/// What a key of the credential plane is for.
#[derive(Clone, Copy, Debug)]
enum CredentialKey {
    Issuer,
    Recipient,
    Store,
}

impl CredentialKey {
    const fn name(self) -> &'static str {
        match self {
            Self::Issuer => "issuer",
            Self::Recipient => "recipient",
            Self::Store => "store",
        }
    }

    const fn kind(self) -> KeyKind {
        match self {
            Self::Issuer => KeyKind::IssuerSecret,
            Self::Recipient => KeyKind::RecipientSecret,
            Self::Store => KeyKind::StoreSecret,
        }
    }

    /// The text of its public half.
    fn public(self, secret: &[u8; 32]) -> Option<String> {
        match self {
            Self::Issuer => Some(IssuerKey::from_seed(secret).public().text()),
            Self::Recipient => Some(RecipientKey::from_bytes(secret).public().text()),
            Self::Store => None,
        }
    }
}

/// Why a command ended without its files.
#[derive(Debug)]
pub(crate) enum PkiError {
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    Exists {
        path: PathBuf,
    },
    TooLong {
        path: PathBuf,
    },
    NotPem {
        path: PathBuf,
    },
    NoCertificate {
        path: PathBuf,
    },
    CaKeyUnusable {
        path: PathBuf,
    },
    NotACa {
        path: PathBuf,
    },
    CaExpired {
        path: PathBuf,
    },
    CaKeyMismatch {
        certificate: PathBuf,
        key: PathBuf,
    },
    TrustDomain {
        given: String,
    },
    Name {
        given: String,
    },
    ReservedName {
        given: String,
    },
    Make {
        what: &'static str,
        source: rcgen::Error,
    },
    NoRandomness,
    Output {
        source: io::Error,
    },
}

impl fmt::Display for PkiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { what, path, source } => write!(f, "{what} {}: {source}", path.display()),
            Self::Exists { path } => {
                write!(f, "{} exists; --force replaces it", path.display())
            }
            Self::TooLong { path } => {
                write!(f, "{} is longer than {PEM_BYTES_MAX} bytes", path.display())
            }
            Self::NotPem { path } => write!(f, "{} is not valid PEM", path.display()),
            Self::NoCertificate { path } => write!(f, "{} holds no certificate", path.display()),
            Self::CaKeyUnusable { path } => {
                write!(
                    f,
                    "{} holds no private key this program can sign with",
                    path.display()
                )
            }
            Self::NotACa { path } => write!(
                f,
                "{} is not a certificate authority of one trust domain (spiffe://…)",
                path.display()
            ),
            Self::CaExpired { path } => write!(f, "{} is not valid now", path.display()),
            Self::CaKeyMismatch { certificate, key } => {
                write!(
                    f,
                    "{} does not belong to {}",
                    key.display(),
                    certificate.display()
                )
            }
            Self::TrustDomain { given } => write!(
                f,
                "{given:?} is not a trust domain: 1 to 255 of a-z 0-9 . - _, such as iop.example"
            ),
            Self::Name { given } => write!(
                f,
                "{given:?} is not a name: 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . - _"
            ),
            Self::ReservedName { given } => {
                write!(f, "{given:?} is the name of the authority's own files")
            }
            Self::Make { what, source } => write!(f, "cannot make {what}: {source}"),
            Self::NoRandomness => f.write_str("the system gives no random bytes"),
            Self::Output { source } => write!(f, "cannot write to standard output: {source}"),
        }
    }
}

impl std::error::Error for PkiError {}

/// Runs one `iop pki` command; `now` judges and dates certificates.
///
/// # Errors
/// What could not be read, made or written, with its path.
pub(crate) fn run(
    command: &PkiCommand,
    now: OffsetDateTime,
    out: &mut dyn Write,
) -> Result<(), PkiError> {
    match command {
        PkiCommand::Init(args) => init(args, now, out),
        PkiCommand::Node(args) => leaf(args, Role::Node, now, out),
        PkiCommand::Edge(args) => leaf(args, Role::Edge, now, out),
        PkiCommand::Issuer(args) => credential_key(args, CredentialKey::Issuer, out),
        PkiCommand::Recipient(args) => credential_key(args, CredentialKey::Recipient, out),
        PkiCommand::StoreKey(args) => credential_key(args, CredentialKey::Store, out),
        PkiCommand::Show(args) => args.files.iter().try_for_each(|path| show(path, now, out)),
    }
}

fn init(args: &InitArgs, now: OffsetDateTime, out: &mut dyn Write) -> Result<(), PkiError> {
    let domain = &args.trust_domain;
    if !is_trust_domain(domain) {
        return Err(PkiError::TrustDomain {
            given: domain.clone(),
        });
    }
    let mut params = params(
        &format!("IOP CA {domain}"),
        &format!("spiffe://{domain}"),
        now,
    )?;
    params.not_after = now + Duration::days(args.days.into());
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().map_err(|source| PkiError::Make {
        what: "a key",
        source,
    })?;
    let made = params.self_signed(&key);
    let certificate = made
        .map_err(|source| PkiError::Make {
            what: "the authority",
            source,
        })?
        .pem();
    make_directory(&args.dir)?;
    write_certificate(&args.dir, "ca", certificate, &key, args.force, out)
}

fn leaf(
    args: &LeafArgs,
    role: Role,
    now: OffsetDateTime,
    out: &mut dyn Write,
) -> Result<(), PkiError> {
    let name = &args.name;
    if !is_label(name) {
        return Err(PkiError::Name {
            given: name.clone(),
        });
    }
    if name == "ca" {
        return Err(PkiError::ReservedName {
            given: name.clone(),
        });
    }
    let ca = Ca::load(&args.dir, now)?;
    let id = format!("spiffe://{}/{}/{name}", ca.trust_domain, role.name());
    let mut params = params(&format!("{} {name}", role.name()), &id, now)?;
    params.not_after = now + Duration::days(args.days.into());
    if params.not_after > ca.not_after {
        params.not_after = ca.not_after;
        say(
            out,
            format_args!(
                "valid only until the authority ends, {} UTC",
                date(ca.not_after)
            ),
        )?;
    }
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![role.purpose()];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().map_err(|source| PkiError::Make {
        what: "a key",
        source,
    })?;
    let made = params.signed_by(&key, &ca.issuer);
    let certificate = made
        .map_err(|source| PkiError::Make {
            what: "the certificate",
            source,
        })?
        .pem();
    write_certificate(&args.dir, name, certificate, &key, args.force, out)
}

/// A key of the credential plane: `NAME.<kind>.key`, and `NAME.<kind>.pub` where it has a public half.
fn credential_key(args: &KeyArgs, of: CredentialKey, out: &mut dyn Write) -> Result<(), PkiError> {
    if !is_label(&args.name) {
        return Err(PkiError::Name {
            given: args.name.clone(),
        });
    }
    let mut secret = Zeroizing::new([0; 32]);
    SystemRandom::new()
        .fill(&mut *secret)
        .map_err(|_| PkiError::NoRandomness)?;
    make_directory(&args.dir)?;
    let path = |end: &str| args.dir.join(format!("{}.{}.{end}", args.name, of.name()));
    let public = of.public(&secret).map(|text| (path("pub"), text));
    let text = secret_text(of.kind(), &secret);
    write_pair((&path("key"), text.as_bytes()), public, args.force, out)
}

/// What authority and leaf have in common.
fn params(
    common_name: &str,
    uri: &str,
    now: OffsetDateTime,
) -> Result<CertificateParams, PkiError> {
    let uri = uri.try_into().map_err(|source| PkiError::Make {
        what: "the identity",
        source,
    })?;
    let mut serial = [0; 16];
    SystemRandom::new()
        .fill(&mut serial)
        .map_err(|_| PkiError::NoRandomness)?;
    serial[0] = serial[0] & 0x7f | 0x40; // positive and of full length (RFC 5280 §4.1.2.2)
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, "IOP Edge");
    name.push(DnType::CommonName, common_name);
    let mut params = CertificateParams::default();
    params.not_before = now - BACKDATED;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.distinguished_name = name;
    params.subject_alt_names = vec![SanType::URI(uri)];
    Ok(params)
}

/// A loaded authority.
struct Ca {
    issuer: Issuer<'static, KeyPair>,
    trust_domain: String,
    not_after: OffsetDateTime,
}

impl Ca {
    fn load(directory: &Path, now: OffsetDateTime) -> Result<Self, PkiError> {
        let (certificate, key) = (directory.join("ca.crt"), directory.join("ca.key"));
        let text = Zeroizing::new(read(&key)?);
        let pair = core::str::from_utf8(&text)
            .ok()
            .and_then(|text| KeyPair::from_pem(text).ok());
        let pair = pair.ok_or_else(|| PkiError::CaKeyUnusable { path: key.clone() })?;
        let no_ca = || PkiError::NotACa {
            path: certificate.clone(),
        };
        let der = certificates(&certificate)?
            .into_iter()
            .next()
            .ok_or_else(|| PkiError::NoCertificate {
                path: certificate.clone(),
            })?;
        let parsed = parse(&der).ok_or_else(no_ca)?;
        let trust_domain = spiffe_ids(&parsed)
            .first()
            .and_then(|id| id.strip_prefix("spiffe://"))
            .filter(|domain| parsed.is_ca() && is_trust_domain(domain))
            .ok_or_else(no_ca)?
            .to_owned();
        let validity = parsed.validity();
        let not_after = validity.not_after.to_datetime();
        if now < validity.not_before.to_datetime() || now >= not_after {
            return Err(PkiError::CaExpired { path: certificate });
        }
        if !holds_key(&parsed, &pair) {
            return Err(PkiError::CaKeyMismatch { certificate, key });
        }
        let issuer = Issuer::from_ca_cert_der(&der.as_slice().into(), pair);
        let issuer = issuer.map_err(|source| PkiError::Make {
            what: "the issuer",
            source,
        })?;
        Ok(Self {
            issuer,
            trust_domain,
            not_after,
        })
    }
}

fn holds_key(certificate: &X509Certificate<'_>, pair: &KeyPair) -> bool {
    certificate.public_key().subject_public_key.as_ref() == pair.public_key_raw()
}

fn make_directory(path: &Path) -> Result<(), PkiError> {
    let made = DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path);
    made.map_err(|source| PkiError::Io {
        what: "cannot make",
        path: path.to_owned(),
        source,
    })
}

/// Writes a key, then what is public of it, if anything is: who sees that finds its key. Both or neither,
/// unless an old pair is replaced.
fn write_pair(
    key: (&Path, &[u8]),
    public: Option<(PathBuf, String)>,
    force: bool,
    out: &mut dyn Write,
) -> Result<(), PkiError> {
    let (key_path, key) = key;
    let public_path = public.as_ref().map(|(path, _)| path.as_path());
    if !force
        && let Some(path) = public_path
            .into_iter()
            .chain([key_path])
            .find(|path| path.exists())
    {
        return Err(PkiError::Exists {
            path: path.to_owned(),
        });
    }
    write_file(key_path, key, KEY_MODE, force)?;
    if let Some((path, text)) = &public {
        let written = write_file(path, text.as_bytes(), CERTIFICATE_MODE, force);
        if written.is_err() && !force {
            // Ours, and useless alone; the error that matters is the one returned.
            let _ = fs::remove_file(key_path);
        }
        written?;
        say(out, format_args!("wrote {}", path.display()))?;
    }
    say(out, format_args!("wrote {}", key_path.display()))
}

/// An authority's or a leaf's `NAME.crt` and `NAME.key`.
fn write_certificate(
    directory: &Path,
    name: &str,
    certificate: String,
    key: &KeyPair,
    force: bool,
    out: &mut dyn Write,
) -> Result<(), PkiError> {
    let public = (directory.join(format!("{name}.crt")), certificate);
    let pem = Zeroizing::new(key.serialize_pem());
    let path = directory.join(format!("{name}.key"));
    write_pair((&path, pem.as_bytes()), Some(public), force, out)
}

/// The file appears whole, with its mode, or not at all.
fn write_file(path: &Path, bytes: &[u8], mode: u32, force: bool) -> Result<(), PkiError> {
    let failed = |source| PkiError::Io {
        what: "cannot write",
        path: path.to_owned(),
        source,
    };
    let draft = path.with_added_extension(format!("{}.new", std::process::id()));
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&draft)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?; // whatever the umask took
        file.write_all(bytes)?;
        file.sync_all()?;
        if force {
            fs::rename(&draft, path)
        } else {
            fs::hard_link(&draft, path)
        }
    })();
    if !force || written.is_err() {
        // Nothing hangs on it: the draft has served, or was never made.
        let _ = fs::remove_file(&draft);
    }
    match written {
        Err(source) if source.kind() == io::ErrorKind::AlreadyExists => Err(PkiError::Exists {
            path: path.to_owned(),
        }),
        written => written.map_err(failed),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, PkiError> {
    let failed = |source| PkiError::Io {
        what: "cannot read",
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(u64::from(PEM_BYTES_MAX) + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() > PEM_BYTES_MAX as usize {
        return Err(PkiError::TooLong {
            path: path.to_owned(),
        });
    }
    Ok(bytes)
}

/// Certificates of a PEM file, DER; other blocks are passed over.
pub(crate) fn certificates(path: &Path) -> Result<Vec<Vec<u8>>, PkiError> {
    let bytes = Zeroizing::new(read(path)?);
    let mut found = Vec::new();
    for block in Pem::iter_from_buffer(&bytes) {
        let block = block.map_err(|_| PkiError::NotPem {
            path: path.to_owned(),
        })?;
        let contents = Zeroizing::new(block.contents);
        if block.label == "CERTIFICATE" {
            found.push(contents.to_vec());
        }
    }
    Ok(found)
}

pub(crate) fn parse(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    rest.is_empty().then_some(certificate)
}

fn spiffe_ids<'a>(certificate: &'a X509Certificate<'_>) -> Vec<&'a str> {
    let names = certificate.subject_alternative_name().ok().flatten();
    let names = names
        .map(|extension| extension.value.general_names.as_slice())
        .unwrap_or_default();
    let uris = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    uris.collect()
}

fn show(path: &Path, now: OffsetDateTime, out: &mut dyn Write) -> Result<(), PkiError> {
    let found = certificates(path)?;
    if found.is_empty() {
        return Err(PkiError::NoCertificate {
            path: path.to_owned(),
        });
    }
    for der in found {
        let certificate = parse(&der).ok_or_else(|| PkiError::NotPem {
            path: path.to_owned(),
        })?;
        let validity = certificate.validity();
        let (from, to) = (
            validity.not_before.to_datetime(),
            validity.not_after.to_datetime(),
        );
        let state = if now < from {
            "not yet valid".to_owned()
        } else if now > to {
            "EXPIRED".to_owned()
        } else {
            format!("{} days left", (to - now).whole_days())
        };
        let kind = if certificate.is_ca() {
            "certificate authority"
        } else {
            "workload"
        };
        say(out, format_args!("{}: {kind}", path.display()))?;
        say(
            out,
            format_args!("  subject      {}", certificate.subject()),
        )?;
        say(out, format_args!("  issuer       {}", certificate.issuer()))?;
        say(
            out,
            format_args!("  spiffe id    {}", spiffe_ids(&certificate).join(" ")),
        )?;
        say(
            out,
            format_args!("  valid        {} to {} UTC, {state}", date(from), date(to)),
        )?;
        say(
            out,
            format_args!(
                "  sha256       {}",
                hex(digest(&SHA256, &der).as_ref(), ":")
            ),
        )?;
    }
    Ok(())
}

pub(crate) fn date(at: OffsetDateTime) -> String {
    let (hour, minute, second) = at.time().as_hms();
    format!("{} {hour:02}:{minute:02}:{second:02}", at.date())
}

/// Runs one `iop key` command: the key alone to `out`, so that a script can take it, and what the
/// operator does with its hash to `notes`. The two never share a stream that ends in a file.
///
/// # Errors
/// When there is no randomness, or nobody reads the answer.
pub(crate) fn run_key(
    command: &KeyCommand,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), PkiError> {
    let KeyCommand::New { principal } = command;
    if !is_label(principal) {
        return Err(PkiError::Name {
            given: principal.clone(),
        });
    }
    let mut random = Zeroizing::new([0; API_KEY_BYTES]);
    SystemRandom::new()
        .fill(&mut *random)
        .map_err(|_| PkiError::NoRandomness)?;
    let key = Zeroizing::new(format!("iop_{}", &*Zeroizing::new(hex(&*random, ""))));
    let hash = hex(digest(&SHA256, key.as_bytes()).as_ref(), "");
    say(out, format_args!("{}", &*key))?;
    say(
        notes,
        format_args!("\nThat is the key, shown this once. edge.yaml knows it by its hash:\n"),
    )?;
    say(
        notes,
        format_args!("keys:\n  - principal: {principal}\n    sha256: {hash}"),
    )
}

fn hex(bytes: &[u8], between: &str) -> String {
    let digits: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.join(between)
}

fn say(out: &mut dyn Write, line: fmt::Arguments<'_>) -> Result<(), PkiError> {
    writeln!(out, "{line}").map_err(|source| PkiError::Output { source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command line's command; the directory is this test's own.
    fn leaf_args(dir: &Path) -> LeafArgs {
        LeafArgs {
            name: "n1".to_owned(),
            dir: dir.to_owned(),
            days: 90,
            force: true,
        }
    }

    #[test]
    fn an_authority_that_has_ended_signs_nothing() {
        let dir = std::env::temp_dir().join(format!("iop-pki-test-{}", std::process::id()));
        let start = OffsetDateTime::UNIX_EPOCH + Duration::days(20_000);
        let init = InitArgs {
            dir: dir.clone(),
            trust_domain: "iop.test".to_owned(),
            days: 1,
            force: false,
        };
        run(&PkiCommand::Init(init), start, &mut io::sink()).unwrap();
        let leaf = |now| run(&PkiCommand::Node(leaf_args(&dir)), now, &mut io::sink());
        let day = start + Duration::days(1);
        let results = [
            leaf(start - BACKDATED),
            leaf(day - Duration::SECOND),
            leaf(day),
            leaf(start - Duration::days(1)),
        ];
        let mut shown = Vec::new();
        show(&dir.join("n1.crt"), day, &mut shown).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        let [early, last, over, before] = results;
        assert!(early.is_ok() && last.is_ok(), "{early:?} {last:?}");
        assert!(matches!(over, Err(PkiError::CaExpired { .. })), "{over:?}");
        assert!(
            matches!(before, Err(PkiError::CaExpired { .. })),
            "{before:?}"
        );
        let shown = String::from_utf8(shown).unwrap();
        assert!(
            shown.contains("2024-10-05 00:00:00 UTC, 0 days left"),
            "{shown}"
        );
    }
}
