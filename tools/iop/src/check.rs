//! `iop check`: what is wrong with a configuration, its certificates, or this host, and the remedy.
//!
//! Lives on: the main thread of a short command. View: the moment of the check. Bound: the
//! configuration's own bounds; a handful of probes.
use core::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use io_uring::{IoUring, Probe, opcode};
use iop_dataplane::config::{EdgeConfig, Host, PkiFiles};
use iop_dataplane::credential::plane::Plane;
use iop_dataplane::shard::uring::{Kind, Ring, Token};
use iop_dataplane::tls::handshake::{client_server_config, node_server_config};
use time::OffsetDateTime;

use crate::pki;

#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true).multiple(true)))]
pub(crate) struct CheckArgs {
    /// A configuration file of an Edge or a node agent, with the certificates it names
    #[arg(long, group = "what")]
    config: Option<PathBuf>,
    /// What this host offers: kernel, io_uring, limits, memory
    #[arg(long, group = "what")]
    host: bool,
    /// What the file configures; found out from its fields when left out
    #[arg(long = "as", value_enum, requires = "config")]
    kind: Option<FileKind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FileKind {
    Edge,
    Node,
}

/// Oldest kernel with multishot receive, deferred task work and ring-provided buffers as used here.
const KERNEL_MIN: (u32, u32) = (6, 1);
/// Descriptors besides connections: listeners, rings, doorbells, log, files being read.
const DESCRIPTORS_OTHER: u64 = 256;
/// A backlog below this drops connections in a burst that one turn of the front could take.
const BACKLOG_MIN: u64 = 1024;
/// A certificate with fewer days left is worth a word.
const DAYS_LEFT_MIN: i64 = 7;
const PROBE_WAIT: Duration = Duration::from_secs(2);

/// How a finding stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grade {
    Ok,
    /// Works, but not as it should.
    Warning,
    Failure,
}

/// Prints findings and keeps the worst.
struct Report<'a> {
    out: &'a mut dyn Write,
    failed: bool,
}

impl Report<'_> {
    fn say(&mut self, grade: Grade, what: fmt::Arguments<'_>) -> io::Result<()> {
        let word = match grade {
            Grade::Ok => "ok      ",
            Grade::Warning => "warning ",
            Grade::Failure => "FAILED  ",
        };
        self.failed |= grade == Grade::Failure;
        writeln!(self.out, "{word}{what}")
    }

    /// `remedy` is told unless `good`, which otherwise is a failure or a warning by `grade`.
    fn judge(
        &mut self,
        good: bool,
        grade: Grade,
        what: fmt::Arguments<'_>,
        remedy: &str,
    ) -> io::Result<()> {
        if good {
            self.say(Grade::Ok, what)
        } else {
            self.say(grade, format_args!("{what}\n        {remedy}"))
        }
    }
}

/// Runs the checks that were asked for; exit code 1 when one failed.
///
/// # Errors
/// When the report cannot be written.
pub(crate) fn run(
    args: &CheckArgs,
    now: OffsetDateTime,
    out: &mut dyn Write,
) -> io::Result<ExitCode> {
    let mut report = Report { out, failed: false };
    let mut clients_max = 0;
    if let Some(path) = &args.config {
        match args.kind.unwrap_or_else(|| kind_of(path)) {
            FileKind::Edge => clients_max = edge(path, now, &mut report)?,
            FileKind::Node => node(path, &mut report)?,
        }
    }
    if args.host {
        host(clients_max, &mut report)?;
    }
    report.out.flush()?;
    Ok(if report.failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// An Edge's file has `nodes` or `listeners` at its left margin; a node agent's has neither.
fn kind_of(path: &Path) -> FileKind {
    let text = fs::read_to_string(path).unwrap_or_default();
    let edge = ["listeners", "nodes", "models", "shards"];
    let field = |line: &str| edge.iter().any(|name| line.split(':').next() == Some(name));
    if text.is_empty() || text.lines().any(field) {
        FileKind::Edge
    } else {
        FileKind::Node
    }
}

// ── edge.yaml ─────────────────────────────────────────────────────────────────────────────────────

/// Client connections the file allows, 0 when it is wrong.
fn edge(path: &Path, now: OffsetDateTime, report: &mut Report<'_>) -> io::Result<u64> {
    let config = match EdgeConfig::load(path) {
        Ok(config) => config,
        Err(error) => {
            report.failed = true;
            writeln!(report.out, "{error}")?;
            return Ok(0);
        }
    };
    let names = &config.names;
    report.say(
        Grade::Ok,
        format_args!(
            "{}: {} shard, {} nodes, {} providers, {} models, {} keys",
            path.display(),
            config.shards,
            names.nodes.len(),
            names.providers.len(),
            names.models.len(),
            config.keys.len()
        ),
    )?;
    let total: u64 = config.reserved().iter().map(|line| line.bytes).sum();
    report.say(
        Grade::Ok,
        format_args!("{} MiB reserved at start, of these", total >> 20),
    )?;
    for line in config.reserved() {
        writeln!(
            report.out,
            "        {:>6} MiB {}",
            line.bytes >> 20,
            line.holder
        )?;
    }
    for warning in config.warnings() {
        report.say(Grade::Warning, format_args!("{warning}"))?;
    }
    if let Some(files) = &config.pki {
        let made = node_server_config(
            files,
            &config.trust_domain,
            &config.edge_name,
            now.unix_timestamp(),
        );
        match made {
            Ok(_) => identity(files, now, report)?,
            Err(error) => report.say(Grade::Failure, format_args!("{error}"))?,
        }
    }
    if let Some(files) = &config.clients_tls {
        match client_server_config(files, now.unix_timestamp()) {
            Ok(_) => certificate("clients", &files.cert, &files.key, now, report)?,
            Err(error) => report.say(Grade::Failure, format_args!("{error}"))?,
        }
    }
    match Plane::open(&config) {
        Ok(None) => {}
        Ok(Some(plane)) => {
            report.say(Grade::Ok, format_args!("{}", plane.summary()))?;
            for warning in plane.warnings() {
                report.say(Grade::Warning, format_args!("{warning}"))?;
            }
        }
        Err(error) => report.say(Grade::Failure, format_args!("credential plane: {error}"))?,
    }
    Ok(config.limits.clients_max.into())
}

/// The Edge's own certificate is usable; is it what nodes will accept?
fn identity(files: &PkiFiles, now: OffsetDateTime, report: &mut Report<'_>) -> io::Result<()> {
    certificate("nodes", &files.cert, &files.key, now, report)?;
    let (Ok(chain), Ok(roots)) = (pki::certificates(&files.cert), pki::certificates(&files.ca))
    else {
        return Ok(());
    };
    // A chain's last certificate is signed by a root, unless nodes trust another bundle.
    let signed = chain
        .last()
        .and_then(|der| pki::parse(der))
        .is_some_and(|last| {
            let mut roots = roots.iter().filter_map(|der| pki::parse(der));
            roots.any(|root| last.verify_signature(Some(root.public_key())).is_ok())
        });
    let root = if signed { "a root" } else { "no root" };
    report.judge(
        signed,
        Grade::Warning,
        format_args!(
            "{} is signed by {root} in {}",
            files.cert.display(),
            files.ca.display()
        ),
        "nodes refuse it unless they trust another bundle",
    )
}

fn certificate(
    what: &str,
    cert: &Path,
    key: &Path,
    now: OffsetDateTime,
    report: &mut Report<'_>,
) -> io::Result<()> {
    let chain = pki::certificates(cert).unwrap_or_default();
    if let Some(leaf) = chain.first().and_then(|der| pki::parse(der)) {
        let end = leaf.validity().not_after.to_datetime();
        let days = (end - now).whole_days();
        report.judge(
            days >= DAYS_LEFT_MIN,
            Grade::Warning,
            format_args!("{}, towards {what}: {days} days left", cert.display()),
            &format!("it ends {} UTC: renew it", pki::date(end)),
        )?;
    }
    let mode = fs::metadata(key).map_or(0, |metadata| metadata.permissions().mode());
    let private = mode & 0o077 == 0;
    let is = if private { "is" } else { "is not" };
    report.judge(
        private,
        Grade::Warning,
        format_args!(
            "{} {is} private (mode {:04o})",
            key.display(),
            mode & 0o7777
        ),
        "others may read it: chmod 600",
    )
}

// ── node.yaml ─────────────────────────────────────────────────────────────────────────────────────

fn node(path: &Path, report: &mut Report<'_>) -> io::Result<()> {
    let config = match iop_agent::load(path) {
        Ok(config) => config,
        Err(error) => {
            report.failed = true;
            return writeln!(report.out, "{error}");
        }
    };
    report.say(
        Grade::Ok,
        format_args!(
            "{}: node {} dials {}:{}",
            path.display(),
            config.node_id,
            config.edge.host,
            config.edge.port
        ),
    )?;
    match iop_agent::check_credentials(&config) {
        Ok(()) => report.say(Grade::Ok, format_args!("its certificate files can be used")),
        Err(error) => report.say(Grade::Failure, format_args!("{error}")),
    }
}

// ── host ──────────────────────────────────────────────────────────────────────────────────────────

fn host(clients_max: u64, report: &mut Report<'_>) -> io::Result<()> {
    kernel(report)?;
    io_uring_allowed(report)?;
    io_uring_opcodes(report)?;
    io_uring_receives(report)?;
    limits(clients_max, report)?;
    let host = Host::probe();
    let memory = host.memory_bytes.unwrap_or(0) >> 20;
    report.judge(
        memory > 0,
        Grade::Warning,
        format_args!("{memory} MiB of memory"),
        "/proc/meminfo cannot be read: whether the pools fit is not checked",
    )?;
    report.judge(
        host.cores.len() >= 2,
        Grade::Warning,
        format_args!("{} cores", host.cores.len()),
        "shard, control and front share one core: expect latency when a handshake runs",
    )?;
    let backlog = number("/proc/sys/net/core/somaxconn").unwrap_or(0);
    report.judge(
        backlog >= BACKLOG_MIN,
        Grade::Warning,
        format_args!("net.core.somaxconn = {backlog}"),
        "bursts of connections are dropped: sysctl -w net.core.somaxconn=4096",
    )
}

fn kernel(report: &mut Report<'_>) -> io::Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let version = version(&release);
    report.judge(
        version.is_some_and(|version| version >= KERNEL_MIN),
        Grade::Failure,
        format_args!("kernel {}", release.trim()),
        &format!("Linux {}.{} or newer is needed", KERNEL_MIN.0, KERNEL_MIN.1),
    )
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Old kernels do not have the switch: then nothing is disabled.
fn io_uring_allowed(report: &mut Report<'_>) -> io::Result<()> {
    let disabled = number("/proc/sys/kernel/io_uring_disabled").unwrap_or(0);
    let group = number("/proc/sys/kernel/io_uring_group");
    report.judge(
        disabled == 0,
        if disabled == 1 {
            Grade::Warning
        } else {
            Grade::Failure
        },
        format_args!("kernel.io_uring_disabled = {disabled}"),
        &match (disabled, group) {
            (1, Some(group)) => format!(
                "only privileged processes and group {group} may use io_uring; \
                 sysctl -w kernel.io_uring_disabled=0"
            ),
            _ => "sysctl -w kernel.io_uring_disabled=0".to_owned(),
        },
    )
}

/// The remedy of a ring that cannot be made.
fn ring_remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "refused: a container's seccomp profile (Docker's and containerd's default) or \
             kernel.io_uring_disabled; run with a profile that allows io_uring_setup, \
             io_uring_enter and io_uring_register"
        }
        Some(libc::ENOSYS) => "not there: a kernel without io_uring, or a sandbox such as gVisor",
        Some(libc::ENOMEM) => "no memory may be locked: raise RLIMIT_MEMLOCK (ulimit -l)",
        Some(libc::EMFILE | libc::ENFILE) => {
            "no descriptor is free: raise RLIMIT_NOFILE (ulimit -n)"
        }
        Some(libc::EINVAL) => "this kernel is too old for the options used",
        _ => "unexpected; is this a supported kernel?",
    }
}

fn io_uring_opcodes(report: &mut Report<'_>) -> io::Result<()> {
    let ring = match IoUring::new(8) {
        Ok(ring) => ring,
        Err(error) => {
            let remedy = ring_remedy(&error);
            return report.judge(
                false,
                Grade::Failure,
                format_args!("io_uring: {error}"),
                remedy,
            );
        }
    };
    report.judge(
        ring.params().is_feature_ext_arg(),
        Grade::Failure,
        format_args!("io_uring waits with a timeout (EXT_ARG)"),
        "this kernel cannot; a newer one is needed",
    )?;
    let mut probe = Probe::new();
    if let Err(error) = ring.submitter().register_probe(&mut probe) {
        let remedy = ring_remedy(&error);
        return report.judge(
            false,
            Grade::Failure,
            format_args!("io_uring probe: {error}"),
            remedy,
        );
    }
    let wanted = [
        ("RECV", opcode::Recv::CODE),
        ("SENDMSG", opcode::SendMsg::CODE),
        ("SEND", opcode::Send::CODE),
        ("POLL_ADD", opcode::PollAdd::CODE),
        ("READ", opcode::Read::CODE),
        ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
    ];
    let missing: Vec<_> = wanted
        .iter()
        .filter(|(_, code)| !probe.is_supported(*code))
        .map(|(name, _)| *name)
        .collect();
    report.judge(
        missing.is_empty(),
        Grade::Failure,
        format_args!("io_uring operations"),
        &format!("missing: {}; a newer kernel is needed", missing.join(", ")),
    )
}

/// Makes the ring a shard makes and receives once through it: what no probe answers (deferred task
/// work, ring-provided buffers, multishot receive) is tried.
fn io_uring_receives(report: &mut Report<'_>) -> io::Result<()> {
    let what = "io_uring as a shard uses it (DEFER_TASKRUN, buffer ring, multishot RECV)";
    match try_receive() {
        Ok(()) => report.say(Grade::Ok, format_args!("{what}")),
        Err(error) => report.judge(
            false,
            Grade::Failure,
            format_args!("{what}: {error}"),
            ring_remedy(&error),
        ),
    }
}

fn try_receive() -> io::Result<()> {
    let stage = |error: iop_dataplane::shard::uring::RingError| error.source;
    let mut ring = Ring::new(64).map_err(stage)?;
    let _buffers = ring.receive_buffers(0, 4, 4096).map_err(stage)?;
    let (mut near, far) = UnixStream::pair()?;
    let token = Token::new(Kind::SessionReceive, 0, 1);
    ring.receive_multi(far.as_raw_fd(), 0, token);
    near.write_all(b"iop")?;
    ring.submit_and_wait(PROBE_WAIT);
    let mut inbox = Vec::with_capacity(4);
    ring.reap(&mut inbox);
    match inbox.first() {
        Some(completion) if completion.result == 3 && completion.buffer().is_some() => Ok(()),
        Some(completion) if completion.result < 0 => {
            Err(io::Error::from_raw_os_error(-completion.result))
        }
        Some(_) => Err(io::Error::other("an unexpected completion")),
        None => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn limits(clients_max: u64, report: &mut Report<'_>) -> io::Result<()> {
    let text = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let descriptors = limit(&text, "Max open files").unwrap_or(0);
    let wanted = DESCRIPTORS_OTHER + clients_max.max(1024);
    report.judge(
        descriptors >= wanted,
        if clients_max > 0 {
            Grade::Failure
        } else {
            Grade::Warning
        },
        format_args!("RLIMIT_NOFILE = {descriptors}, at least {wanted} wanted"),
        "raise it: ulimit -n, or LimitNOFILE= in the systemd unit",
    )?;
    let locked = limit(&text, "Max locked memory").unwrap_or(0);
    let unlimited = locked == u64::MAX;
    let shown = if unlimited {
        "unlimited".to_owned()
    } else {
        format!("{} KiB", locked >> 10)
    };
    report.judge(
        locked >= MEMLOCK_MIN,
        Grade::Warning,
        format_args!("RLIMIT_MEMLOCK = {shown}"),
        "the front's own rings may not start: ulimit -l unlimited, or LimitMEMLOCK= in the unit",
    )
}

/// What the front's runtime locks for its rings.
const MEMLOCK_MIN: u64 = 8 * 1024 * 1024;

/// The soft limit of one row of `/proc/self/limits`; `unlimited` is `u64::MAX`.
fn limit(text: &str, name: &str) -> Option<u64> {
    let row = text.lines().find_map(|line| line.strip_prefix(name))?;
    match row.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        value => value.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_text_is_read() {
        assert_eq!(version("6.18.44-fc-v657\n"), Some((6, 18)));
        assert_eq!(version("5.15"), Some((5, 15)));
        assert_eq!(version(""), None);
        let text = "Limit  Soft Hard Units\nMax open files   1024   4096   files\n\
                    Max locked memory   unlimited   unlimited   bytes\n";
        assert_eq!(limit(text, "Max open files"), Some(1024));
        assert_eq!(limit(text, "Max locked memory"), Some(u64::MAX));
        assert_eq!(limit(text, "Max nothing"), None);
    }
}
