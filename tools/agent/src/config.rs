//! What a node is told to be: the validated form of `node.yaml`, and the only way to get one.
//!
//! Lives on: process start. View: one file. Bound: `FILE_BYTES_MAX`; reports the first problem.
use core::fmt;
use core::time::Duration;
use std::io::Read;
use std::path::{Path, PathBuf};

use iop_control::node::attempt::Patience;
use iop_control::node::supervisor::Policy;
use iop_proto::limits::{
    CLOCK_SKEW_MS_DEFAULT, CLOSE_GRACE_MS_DEFAULT, CREDENTIAL_KEYS_MAX, DEAD_MS_DEFAULT,
    DRAIN_MS_DEFAULT, HEALTH_PROBE_MS_DEFAULT, HEARTBEAT_MS_DEFAULT, NAME_BYTES_MAX,
    PROVIDER_CONNECT_MS_DEFAULT, PROVIDER_IDLE_MS_DEFAULT, STALL_JOIN_MS_MAX, WAIT_MS_MAX,
};
use iop_proto::spiffe::{TRUST_DOMAIN_BYTES_MAX, is_label, is_trust_domain};
use serde::Deserialize;
use serde_saphyr::{Location, Spanned};

/// Longest `node.yaml`, bytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// A managed node waits twice the skew before its first ready; more is a clock to repair.
const SKEW_MS: core::ops::RangeInclusive<u64> = 50..=60_000;

/// A whole, checked configuration of one node agent. `[D-36]`
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Claimed in RegisterRequest; the node certificate's name must map to it. `[A-02]`
    pub node_id: String,
    pub edge: EdgeAddress,
    pub security: Security,
    pub reconnect: Policy,
    /// Ping after this long without having written. `[D-03]`
    pub ping_every: Duration,
    /// The Edge is dead after this long without a byte read; at least twice `ping_every`.
    pub dead_after: Duration,
    /// How long a drain may take after SIGTERM. `[D-07]`
    pub drain_timeout: Duration,
    /// How long a stalled or stopped provider and a health probe are waited for. `[A-19]`
    pub patience: Patience,
    pub provider_http: ProviderHttp,
    /// Tunnels carry credential leases, and none goes without; `None`: the plane is off. `[D-37]`
    pub credentials: Option<CredentialFiles>,
    /// Least severe line that is written.
    pub log_level: tracing::Level,
}

/// Where the Edge listens for nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeAddress {
    /// DNS name, IPv4 or IPv6 address without brackets.
    pub host: String,
    pub port: u16,
}

/// How the connection to the Edge is protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// TLS 1.3, both sides with a workload identity. `[R-008]`
    Mutual {
        /// PEM: roots that sign the Edge's certificate.
        ca: PathBuf,
        /// PEM: this node's certificate, leaf first.
        cert: PathBuf,
        /// PEM: its private key.
        key: PathBuf,
        /// The one identity the Edge may have: `spiffe://<trust domain>/edge/<name>`. `[A-41]`
        edge_id: String,
    },
    /// No TLS at all; an explicit, insecure choice. `[A-40]`
    Plaintext,
}

/// Figures of every HTTP connection to a provider. `[D-20]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderHttp {
    pub connect_timeout: Duration,
    /// Idle connections live this long unless the adapter's options say otherwise.
    pub pool_idle: Duration,
    /// PEM: further roots for `https` providers, beside the system's.
    pub ca: Option<PathBuf>,
}

/// Keys of the managed credential plane, files as `iop pki` makes them. `[A-32]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialFiles {
    /// Secret keys that leases are sealed to: the present one, and others while it is rotated.
    pub recipient_keys: Vec<PathBuf>,
    /// Public keys of the issuers that are trusted.
    pub issuer_keys: Vec<PathBuf>,
    /// An issuer's clock may be ahead by this much. `[A-35]`
    pub clock_skew: Duration,
}

/// Why a `node.yaml` is refused. Shown as `file:line: field: what`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub file: PathBuf,
    /// From 1; `None` when the file could not be read at all.
    pub line: Option<u64>,
    /// Dotted path of the field; empty when the document as a whole is wrong.
    pub field: String,
    pub what: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.what)
    }
}

impl core::error::Error for ConfigError {}

/// Reads and judges a `node.yaml`. Relative paths in it are relative to its directory.
///
/// # Errors
/// The file cannot be read, is not YAML, or its first field that no node can run with.
pub fn load(path: &Path) -> Result<NodeConfig, ConfigError> {
    let unreadable = |what: String| ConfigError {
        file: path.to_owned(),
        line: None,
        field: String::new(),
        what,
    };
    let file = std::fs::File::open(path).map_err(|e| unreadable(format!("cannot open: {e}")))?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|e| unreadable(format!("cannot read: {e}")))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(unreadable(format!("longer than {FILE_BYTES_MAX} bytes")));
    }
    parse(&text, path)
}

/// Judges the text of a `node.yaml`; `path` names it in errors and anchors relative paths.
///
/// # Errors
/// As [`load`], without the reading.
pub fn parse(text: &str, path: &Path) -> Result<NodeConfig, ConfigError> {
    let file: NodeConfigFile = serde_saphyr::from_str(text).map_err(|error| {
        let line = error.location().map(|location| location.line());
        ConfigError {
            file: path.to_owned(),
            line,
            field: line.map_or_else(String::new, |line| field_at(text, line)),
            what: one_line(&error),
        }
    })?;
    Judge { path }.judge(file)
}

/// The parser's message without its source excerpt.
fn one_line(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    let line = text.lines().next().unwrap_or_default();
    line.split(" at line ")
        .next()
        .unwrap_or(line)
        .trim_end_matches(':')
        .to_owned()
}

/// Dotted path of the block-style key on `line` (from 1): its own key and every less indented one
/// above it. Empty when the line has none.
fn field_at(text: &str, line: u64) -> String {
    let mut keys = Vec::new();
    let mut indent = usize::MAX;
    let end = usize::try_from(line).unwrap_or(usize::MAX);
    for line in text.lines().take(end).collect::<Vec<_>>().into_iter().rev() {
        let body = line.trim_start();
        let depth = line.len() - body.len();
        let Some((key, _)) = body.split_once(':').filter(|_| !body.starts_with('#')) else {
            continue;
        };
        if depth < indent && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            keys.push(key);
            indent = depth;
        }
        if depth == 0 {
            break;
        }
    }
    keys.reverse();
    keys.join(".")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeConfigFile {
    node_id: Spanned<String>,
    edge: EdgeSection,
    pki: Option<PkiSection>,
    insecure_plaintext: Option<Spanned<bool>>,
    credential_plane: Option<Spanned<String>>,
    credentials: Option<CredentialSection>,
    reconnect: Option<ReconnectSection>,
    heartbeat: Option<HeartbeatSection>,
    drain_timeout_ms: Option<Spanned<u64>>,
    stall: Option<StallSection>,
    provider_http: Option<ProviderHttpSection>,
    log: Option<LogSection>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EdgeSection {
    address: Spanned<String>,
    trust_domain: Option<Spanned<String>>,
    name: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PkiSection {
    ca: Spanned<String>,
    certificate: Spanned<String>,
    key: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CredentialSection {
    recipient_keys: Spanned<Vec<Spanned<String>>>,
    issuer_keys: Spanned<Vec<Spanned<String>>>,
    clock_skew_ms: Option<Spanned<u64>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReconnectSection {
    interval_sec: Option<Spanned<i64>>,
    max_attempts: Option<Spanned<i64>>,
    jitter: Option<Spanned<f64>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeartbeatSection {
    ping_ms: Option<Spanned<u64>>,
    dead_ms: Option<Spanned<u64>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StallSection {
    close_grace_ms: Option<Spanned<u64>>,
    probe_ms: Option<Spanned<u64>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProviderHttpSection {
    connect_timeout_ms: Option<Spanned<u64>>,
    pool_idle_ms: Option<Spanned<u64>>,
    ca: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LogSection {
    level: Option<Spanned<String>>,
}

struct Judge<'a> {
    path: &'a Path,
}

impl Judge<'_> {
    fn judge(&self, file: NodeConfigFile) -> Result<NodeConfig, ConfigError> {
        let node_id = self.name("node_id", &file.node_id)?;
        let security = self.security(&file)?;
        let credentials = self.credentials(&file, &security)?;
        let (ping_every, dead_after) = self.heartbeat(file.heartbeat.unwrap_or_default())?;
        Ok(NodeConfig {
            node_id,
            security,
            credentials,
            edge: self.address(&file.edge.address)?,
            reconnect: self.reconnect(&file.reconnect.unwrap_or_default())?,
            ping_every,
            dead_after,
            drain_timeout: self.wait(
                "drain_timeout_ms",
                file.drain_timeout_ms.as_ref(),
                DRAIN_MS_DEFAULT,
            )?,
            patience: self.patience(&file.stall.unwrap_or_default())?,
            provider_http: self.provider_http(&file.provider_http.unwrap_or_default())?,
            log_level: self.log_level(file.log.and_then(|log| log.level).as_ref())?,
        })
    }

    fn refuse(&self, field: &str, at: Location, what: impl Into<String>) -> ConfigError {
        let line = (at.line() > 0).then(|| at.line());
        ConfigError {
            file: self.path.to_owned(),
            line,
            field: field.to_owned(),
            what: what.into(),
        }
    }

    fn name(&self, field: &str, name: &Spanned<String>) -> Result<String, ConfigError> {
        if is_label(&name.value) {
            return Ok(name.value.clone());
        }
        let what = format!("must be 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . - _");
        Err(self.refuse(field, name.referenced, what))
    }

    fn trust_domain(&self, field: &str, name: &Spanned<String>) -> Result<String, ConfigError> {
        if is_trust_domain(&name.value) {
            return Ok(name.value.clone());
        }
        let what = format!("must be 1 to {TRUST_DOMAIN_BYTES_MAX} of a-z 0-9 . - _");
        Err(self.refuse(field, name.referenced, what))
    }

    fn security(&self, file: &NodeConfigFile) -> Result<Security, ConfigError> {
        if file
            .insecure_plaintext
            .as_ref()
            .is_some_and(|insecure| insecure.value)
        {
            return Ok(Security::Plaintext);
        }
        let edge = file.edge.address.referenced;
        let needed = "is needed unless insecure_plaintext is true";
        let pki = file
            .pki
            .as_ref()
            .ok_or_else(|| self.refuse("pki", file.node_id.referenced, needed))?;
        let domain = match &file.edge.trust_domain {
            Some(domain) => self.trust_domain("edge.trust_domain", domain)?,
            None => return Err(self.refuse("edge.trust_domain", edge, needed)),
        };
        let name = match &file.edge.name {
            Some(name) => self.name("edge.name", name)?,
            None => return Err(self.refuse("edge.name", edge, needed)),
        };
        Ok(Security::Mutual {
            ca: self.file("pki.ca", &pki.ca)?,
            cert: self.file("pki.certificate", &pki.certificate)?,
            key: self.file("pki.key", &pki.key)?,
            edge_id: format!("spiffe://{domain}/edge/{name}"),
        })
    }

    fn credentials(
        &self,
        file: &NodeConfigFile,
        security: &Security,
    ) -> Result<Option<CredentialFiles>, ConfigError> {
        let Some(plane) = &file.credential_plane else {
            return Ok(None);
        };
        let refuse = |what| self.refuse("credential_plane", plane.referenced, what);
        match plane.value.as_str() {
            "off" => return Ok(None),
            "on" => {}
            _ => return Err(refuse("must be off or on")),
        }
        if *security == Security::Plaintext {
            return Err(refuse("on needs TLS: not insecure_plaintext"));
        }
        let section = file
            .credentials
            .as_ref()
            .ok_or_else(|| refuse("on needs credentials: recipient_keys and issuer_keys"))?;
        let skew = section.clock_skew_ms.as_ref();
        if let Some(skew) = skew.filter(|skew| !SKEW_MS.contains(&skew.value)) {
            let what = format!("must be {} to {} ms", SKEW_MS.start(), SKEW_MS.end());
            return Err(self.refuse("credentials.clock_skew_ms", skew.referenced, what));
        }
        Ok(Some(CredentialFiles {
            recipient_keys: self.keys("credentials.recipient_keys", &section.recipient_keys)?,
            issuer_keys: self.keys("credentials.issuer_keys", &section.issuer_keys)?,
            clock_skew: Duration::from_millis(
                skew.map_or(CLOCK_SKEW_MS_DEFAULT, |skew| skew.value),
            ),
        }))
    }

    fn keys(
        &self,
        field: &str,
        paths: &Spanned<Vec<Spanned<String>>>,
    ) -> Result<Vec<PathBuf>, ConfigError> {
        if !(1..=CREDENTIAL_KEYS_MAX as usize).contains(&paths.value.len()) {
            let what = format!("must name 1 to {CREDENTIAL_KEYS_MAX} files");
            return Err(self.refuse(field, paths.referenced, what));
        }
        let paths = paths.value.iter();
        paths.map(|path| self.file(field, path)).collect()
    }

    fn file(&self, field: &str, path: &Spanned<String>) -> Result<PathBuf, ConfigError> {
        if path.value.is_empty() {
            return Err(self.refuse(field, path.referenced, "must name a file"));
        }
        let directory = self.path.parent().unwrap_or_else(|| Path::new(""));
        Ok(directory.join(&path.value))
    }

    fn address(&self, address: &Spanned<String>) -> Result<EdgeAddress, ConfigError> {
        let parsed = address.value.rsplit_once(':').and_then(|(host, port)| {
            let port = port.parse().ok().filter(|&port| port > 0)?;
            let bracketed = host
                .strip_prefix('[')
                .and_then(|host| host.strip_suffix(']'));
            let host = bracketed.unwrap_or(host);
            let is_v6 = host.contains(':');
            let clean = !host.is_empty() && !host.contains(['/', '@', '[', ']', ' ']);
            let fits = is_v6 == bracketed.is_some();
            let is_address = !is_v6 || host.parse::<std::net::Ipv6Addr>().is_ok();
            let host = host.to_owned();
            (clean && fits && is_address).then_some(EdgeAddress { host, port })
        });
        parsed.ok_or_else(|| {
            let what = "must be host:port, an IPv6 host in brackets";
            self.refuse("edge.address", address.referenced, what)
        })
    }

    fn reconnect(&self, section: &ReconnectSection) -> Result<Policy, ConfigError> {
        let ReconnectSection {
            interval_sec,
            max_attempts,
            jitter,
        } = section;
        let interval = interval_sec.as_ref().map(|value| value.value);
        let attempts = max_attempts.as_ref().map(|value| value.value);
        let policy = Policy::new(interval, attempts, jitter.as_ref().map(|value| value.value));
        policy.map_err(|error| {
            let at = match error.field() {
                "reconnect.interval_sec" => interval_sec.as_ref().map(|value| value.referenced),
                "reconnect.max_attempts" => max_attempts.as_ref().map(|value| value.referenced),
                _ => jitter.as_ref().map(|value| value.referenced),
            };
            self.refuse(error.field(), at.unwrap_or(Location::UNKNOWN), error.text())
        })
    }

    fn heartbeat(&self, section: HeartbeatSection) -> Result<(Duration, Duration), ConfigError> {
        let ping = self.wait(
            "heartbeat.ping_ms",
            section.ping_ms.as_ref(),
            HEARTBEAT_MS_DEFAULT,
        )?;
        let dead = self.wait(
            "heartbeat.dead_ms",
            section.dead_ms.as_ref(),
            DEAD_MS_DEFAULT,
        )?;
        if dead < ping * 2 {
            let at = section
                .dead_ms
                .or(section.ping_ms)
                .map(|value| value.referenced);
            let at = at.unwrap_or(Location::UNKNOWN);
            let what = "must be at least twice heartbeat.ping_ms";
            return Err(self.refuse("heartbeat.dead_ms", at, what));
        }
        Ok((ping, dead))
    }

    fn patience(&self, section: &StallSection) -> Result<Patience, ConfigError> {
        let StallSection {
            close_grace_ms,
            probe_ms,
        } = section;
        let wait = |field, value: &Option<_>, default_ms| {
            self.ms(field, value.as_ref(), default_ms, STALL_JOIN_MS_MAX)
        };
        Ok(Patience {
            grace_ms: wait(
                "stall.close_grace_ms",
                close_grace_ms,
                CLOSE_GRACE_MS_DEFAULT,
            )?,
            probe_ms: wait("stall.probe_ms", probe_ms, HEALTH_PROBE_MS_DEFAULT)?,
        })
    }

    fn provider_http(&self, section: &ProviderHttpSection) -> Result<ProviderHttp, ConfigError> {
        let ProviderHttpSection {
            connect_timeout_ms,
            pool_idle_ms,
            ca,
        } = section;
        Ok(ProviderHttp {
            connect_timeout: self.wait(
                "provider_http.connect_timeout_ms",
                connect_timeout_ms.as_ref(),
                PROVIDER_CONNECT_MS_DEFAULT,
            )?,
            pool_idle: self.wait(
                "provider_http.pool_idle_ms",
                pool_idle_ms.as_ref(),
                u64::from(PROVIDER_IDLE_MS_DEFAULT),
            )?,
            ca: ca
                .as_ref()
                .map(|ca| self.file("provider_http.ca", ca))
                .transpose()?,
        })
    }

    fn log_level(&self, level: Option<&Spanned<String>>) -> Result<tracing::Level, ConfigError> {
        let Some(level) = level else {
            return Ok(tracing::Level::INFO);
        };
        match level.value.as_str() {
            "error" => Ok(tracing::Level::ERROR),
            "warn" => Ok(tracing::Level::WARN),
            "info" => Ok(tracing::Level::INFO),
            "debug" => Ok(tracing::Level::DEBUG),
            "trace" => Ok(tracing::Level::TRACE),
            _ => {
                let what = "must be error, warn, info, debug or trace";
                Err(self.refuse("log.level", level.referenced, what))
            }
        }
    }

    fn wait(
        &self,
        field: &str,
        value: Option<&Spanned<u64>>,
        default_ms: u64,
    ) -> Result<Duration, ConfigError> {
        let ms = self.ms(field, value, default_ms, WAIT_MS_MAX)?;
        Ok(Duration::from_millis(ms))
    }

    fn ms(
        &self,
        field: &str,
        value: Option<&Spanned<u64>>,
        default_ms: u64,
        most: u64,
    ) -> Result<u64, ConfigError> {
        match value {
            None => Ok(default_ms),
            Some(ms) if (1..=most).contains(&ms.value) => Ok(ms.value),
            Some(ms) => {
                let what = format!("must be 1 to {most} ms");
                Err(self.refuse(field, ms.referenced, what))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "\
node_id: gpu-1
edge:
  address: edge.example:7443
  trust_domain: iop.example
  name: edge-1
pki:
  ca: pki/ca.pem
  certificate: /abs/node.pem
  key: pki/node.key
";

    fn parsed(text: &str) -> Result<NodeConfig, ConfigError> {
        parse(text, Path::new("/etc/iop/node.yaml"))
    }

    /// The error of `WHOLE` with `more` appended, as an operator sees it.
    fn refused(more: &str) -> String {
        parsed(&format!("{WHOLE}{more}")).unwrap_err().to_string()
    }

    #[test]
    fn what_is_omitted_has_its_default() {
        let config = parsed(WHOLE).unwrap();
        assert_eq!(config.node_id, "gpu-1");
        assert_eq!(
            config.edge,
            EdgeAddress {
                host: "edge.example".into(),
                port: 7443
            }
        );
        assert_eq!(
            config.reconnect,
            Policy::new(Some(10), Some(10), Some(0.5)).unwrap()
        );
        assert_eq!(config.ping_every, Duration::from_secs(10));
        assert_eq!(config.dead_after, Duration::from_secs(30));
        assert_eq!(config.drain_timeout, Duration::from_secs(60));
        let (grace_ms, probe_ms) = (5_000, 5_000);
        assert_eq!(config.patience, Patience { grace_ms, probe_ms });
        assert_eq!(config.provider_http.pool_idle, Duration::from_millis(3_500));
        let Security::Mutual {
            ca, cert, edge_id, ..
        } = config.security
        else {
            panic!()
        };
        assert_eq!(ca, Path::new("/etc/iop/pki/ca.pem"));
        assert_eq!(cert, Path::new("/abs/node.pem"));
        assert_eq!(edge_id, "spiffe://iop.example/edge/edge-1");
    }

    /// Proves, [R-291], [R-287].
    #[test]
    fn r289_a_null_limit_is_an_omitted_one_and_an_explicit_zero_is_not() {
        let policy =
            |lines: &str| parsed(&format!("{WHOLE}reconnect:\n{lines}")).map(|c| c.reconnect);
        let jitter = Some(0.5);
        let omitted = Policy::new(None, None, jitter).unwrap();
        assert_eq!(policy("  max_attempts:\n").unwrap(), omitted);
        assert_eq!(policy("  max_attempts: ~\n").unwrap(), omitted);
        let unlimited = Policy::new(None, Some(0), jitter).unwrap();
        assert_eq!(policy("  max_attempts: 0\n").unwrap(), unlimited);
        assert_ne!(omitted, unlimited);
        let at = |line: u64, rest| format!("/etc/iop/node.yaml:{line}: reconnect.{rest}");
        let negative = policy("  max_attempts: -1\n").unwrap_err().to_string();
        assert_eq!(
            negative,
            at(11, "max_attempts: must be 0 (unlimited) or positive")
        );
        let zero = policy("  max_attempts: 0\n  interval_sec: 0\n")
            .unwrap_err()
            .to_string();
        let positive = "interval_sec: must be positive when max_attempts is 0 (unlimited)";
        assert_eq!(zero, at(12, positive));
        let jitter = policy("  jitter: 0.6\n").unwrap_err().to_string();
        assert_eq!(jitter, at(11, "jitter: must be within 0 and 0.5"));
    }

    #[test]
    fn every_refusal_names_file_line_and_field() {
        for (more, expected) in [
            (
                "credential_plane: maybe\n",
                ":10: credential_plane: must be off or on",
            ),
            (
                "drain_timeout_ms: 0\n",
                ":10: drain_timeout_ms: must be 1 to 86400000 ms",
            ),
            (
                "heartbeat:\n  ping_ms: 10\n  dead_ms: 19\n",
                ":12: heartbeat.dead_ms: must be at least twice heartbeat.ping_ms",
            ),
            (
                "heartbeat: {ping_ms: 15001}\n",
                ":10: heartbeat.dead_ms: must be at least twice heartbeat.ping_ms",
            ),
            (
                "stall: {probe_ms: 10001}\n",
                ":10: stall.probe_ms: must be 1 to 10000 ms",
            ),
            (
                "stall: {close_grace_ms: 0}\n",
                ":10: stall.close_grace_ms: must be 1 to 10000 ms",
            ),
            (
                "log: {level: loud}\n",
                ":10: log.level: must be error, warn, info, debug or trace",
            ),
            (
                "provider_http:\n  ca: ''\n",
                ":11: provider_http.ca: must name a file",
            ),
        ] {
            assert_eq!(refused(more), format!("/etc/iop/node.yaml{expected}"));
        }
    }

    #[test]
    fn keys_of_the_credential_plane_are_judged_at_their_bounds() {
        let section = |keys: &str, issuers: &str, skew: &str| {
            format!(
                "credential_plane: on\ncredentials:\n  recipient_keys: [{keys}]\n  \
                 issuer_keys: [{issuers}]\n  clock_skew_ms: {skew}\n"
            )
        };
        let judged = |section: &str| parsed(&format!("{WHOLE}{section}"));
        let (most, over) = ("a, b, c, d", "a, b, c, d, e");
        for (keys, issuers, ms) in [("a, /k/b", most, 50), (most, "a", 60_000)] {
            let config = judged(&section(keys, issuers, &ms.to_string())).unwrap();
            let files = config.credentials.expect("the plane is on");
            assert_eq!(files.recipient_keys.len(), keys.split(',').count());
            assert_eq!(files.recipient_keys[0], Path::new("/etc/iop/a"));
            assert_eq!(files.issuer_keys.len(), issuers.split(',').count());
            assert_eq!(files.clock_skew, Duration::from_millis(ms));
        }
        let mut omitted = judged(&section("a", "b", "~")).unwrap();
        let skew = omitted.credentials.take().expect("on").clock_skew;
        assert_eq!(skew, Duration::from_millis(CLOCK_SKEW_MS_DEFAULT));
        let good = section("a", "b", "50");
        let off = judged(&good.replace("plane: on", "plane: off")).unwrap();
        assert_eq!(off.credentials, None);
        let (skew, count) = ("must be 50 to 60000 ms", "must name 1 to 4 files");
        for (more, line, expected) in [
            (
                section("a", "b", "49"),
                14,
                format!("credentials.clock_skew_ms: {skew}"),
            ),
            (
                section("a", "b", "60001"),
                14,
                format!("credentials.clock_skew_ms: {skew}"),
            ),
            (
                section("", "b", "50"),
                12,
                format!("credentials.recipient_keys: {count}"),
            ),
            (
                section(over, "b", "50"),
                12,
                format!("credentials.recipient_keys: {count}"),
            ),
            (
                section("a", "", "50"),
                13,
                format!("credentials.issuer_keys: {count}"),
            ),
            (
                section("a", over, "50"),
                13,
                format!("credentials.issuer_keys: {count}"),
            ),
            (
                "credential_plane: on\n".to_owned(),
                10,
                "credential_plane: on needs credentials: recipient_keys and issuer_keys".to_owned(),
            ),
            (
                format!("{good}insecure_plaintext: true\n"),
                10,
                "credential_plane: on needs TLS: not insecure_plaintext".to_owned(),
            ),
        ] {
            let expected = format!("/etc/iop/node.yaml:{line}: {expected}");
            assert_eq!(refused(&more), expected);
        }
    }

    #[test]
    fn what_the_parser_refuses_has_line_and_field_too() {
        for (more, field) in [
            (
                "reconnect:\n  max_attempts: many\n",
                ":11: reconnect.max_attempts: ",
            ),
            (
                "reconnect:\n  jitter: 0.1\n  tries: 3\n",
                ":12: reconnect.tries: ",
            ),
            ("nodeid: x\n", ":10: nodeid: "),
            ("insecure_plaintext: 7\n", ":10: insecure_plaintext: "),
            ("node_id: twice\n", ":10: node_id: "),
        ] {
            let text = refused(more);
            assert!(
                text.starts_with(&format!("/etc/iop/node.yaml{field}")),
                "{text}"
            );
            assert_eq!(text.lines().count(), 1, "{text}");
        }
        let missing = parsed("node_id: n\n").unwrap_err().to_string();
        assert!(missing.contains("edge"), "{missing}");
        assert!(parsed("").is_err());
        assert!(parsed("[").is_err());
    }

    /// Proves.
    #[test]
    fn r010_identity_is_whole_or_explicitly_absent() {
        for line in ["  trust_domain: iop.example\n", "  name: edge-1\n"] {
            let error = parsed(&WHOLE.replace(line, "")).unwrap_err();
            assert!(error.field.starts_with("edge."), "{error}");
            assert_eq!(error.line, Some(3));
        }
        let bare = "node_id: n\nedge:\n  address: 127.0.0.1:1\n";
        let error = parsed(bare).unwrap_err().to_string();
        let expected = "1: pki: is needed unless insecure_plaintext is true";
        assert_eq!(error, format!("/etc/iop/node.yaml:{expected}"));
        let plain = parsed(&format!("{bare}insecure_plaintext: true\n")).unwrap();
        assert_eq!(plain.security, Security::Plaintext);
        assert!(parsed(&format!("{bare}insecure_plaintext: false\n")).is_err());
    }

    #[test]
    fn addresses_are_judged_whole() {
        let address = |text: &str| {
            parsed(&WHOLE.replace("edge.example:7443", text)).map(|config| config.edge)
        };
        assert_eq!(
            address("'[::1]:80'").unwrap(),
            EdgeAddress {
                host: "::1".into(),
                port: 80
            }
        );
        assert_eq!(address("127.0.0.1:65535").unwrap().port, 65_535);
        for bad in [
            "edge",
            "'edge:'",
            "'edge:0'",
            "edge:65536",
            "'::1:80'",
            "'[edge]:80'",
            "'[::1]'",
            "':80'",
            "'http://e:80'",
        ] {
            let error = address(bad).unwrap_err();
            assert_eq!(
                (error.field.as_str(), error.line),
                ("edge.address", Some(3)),
                "{bad}"
            );
        }
    }

    #[test]
    fn names_are_judged_at_their_bounds() {
        let named = |name: &str| parsed(&WHOLE.replace("gpu-1", name));
        assert!(named(&"n".repeat(256)).is_ok());
        for bad in ["n".repeat(257), "''".into(), "a/b".into(), "a b".into()] {
            assert_eq!(named(&bad).unwrap_err().field, "node_id");
        }
    }

    #[test]
    fn the_shipped_example_is_a_valid_configuration_with_its_defaults_stated() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples/node.yaml");
        let config = load(&path).unwrap();
        assert_eq!(config.reconnect, Policy::new(None, None, None).unwrap());
        assert_eq!(config.dead_after, Duration::from_millis(DEAD_MS_DEFAULT));
        assert!(matches!(config.security, Security::Mutual { .. }));
        let gone = load(Path::new("/nonexistent/node.yaml")).unwrap_err();
        assert!(gone.line.is_none() && gone.to_string().contains("cannot open"));
    }
}
