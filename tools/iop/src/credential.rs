//! `iop credential`: the slots of an Edge's encrypted store.
//!
//! Lives on: the main thread of a short command. View: one edge.yaml and the store it names. Bound: one
//! change of the store; a credential of `SECRET_BYTES_MAX`.
//!
//! A credential is read from standard input or a file, and never printed. A running Edge reads the
//! store again before the next lease.
use core::fmt;
use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use iop_dataplane::config::{ConfigError, CredentialConfig, EdgeConfig};
use iop_dataplane::credential::plane::{PlaneError, Uses, store_key};
use iop_dataplane::credential::store::{Slot, Store, StoreError};
use iop_proto::limits::{NAME_BYTES_MAX, SECRET_BYTES_MAX};
use iop_proto::spiffe::is_label;
use zeroize::Zeroizing;

#[derive(Subcommand, Debug)]
pub(crate) enum CredentialCommand {
    /// Store a credential for one principal, model and profile
    Add(AddArgs),
    /// List slots; credentials are never printed
    List(StoreArgs),
    /// Give a slot another credential
    Rotate(RotateArgs),
    /// Forget a slot
    Remove(RemoveArgs),
}

#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    /// The Edge's configuration, which names store and key
    #[arg(long)]
    config: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct SlotArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Whose requests use it: a principal of `keys`, or `anonymous` when there are none
    #[arg(long)]
    principal: String,
    /// The slot's name, unique for the principal
    #[arg(long)]
    slot: String,
}

#[derive(Args, Debug)]
pub(crate) struct AddArgs {
    #[command(flatten)]
    slot: SlotArgs,
    /// The model whose requests use it
    #[arg(long)]
    route: String,
    /// Id of the protocol profile of the adapters it goes to
    #[arg(long)]
    profile: String,
    /// File that holds the credential; standard input when left out
    #[arg(long)]
    from: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct RotateArgs {
    #[command(flatten)]
    slot: SlotArgs,
    /// File that holds the credential; standard input when left out
    #[arg(long)]
    from: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    slot: SlotArgs,
}

/// Why nothing was changed or listed.
#[derive(Debug)]
pub(crate) enum CredentialError {
    Config(ConfigError),
    /// `credential_plane` is off in the file.
    Off {
        config: PathBuf,
    },
    Plane(PlaneError),
    Store(StoreError),
    /// Not a name for a slot.
    Name {
        given: String,
    },
    /// Nobody could use the slot.
    Unused {
        fault: &'static str,
    },
    Read {
        from: PathBuf,
        source: io::Error,
    },
    /// Standard input would show the credential while it is typed.
    Terminal,
    Output {
        source: io::Error,
    },
}

impl fmt::Display for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Off { config } => {
                write!(f, "{}: credential_plane is off", config.display())
            }
            Self::Plane(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
            Self::Name { given } => write!(
                f,
                "{given:?} is not a name: 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . - _"
            ),
            Self::Unused { fault } => write!(f, "the slot could never be used: {fault}"),
            Self::Read { from, source } => write!(f, "cannot read {}: {source}", from.display()),
            Self::Terminal => f.write_str(
                "standard input is a terminal, which would show the credential; pipe it in, or \
                 name a file with --from",
            ),
            Self::Output { source } => write!(f, "cannot write to standard output: {source}"),
        }
    }
}

impl std::error::Error for CredentialError {}

/// Runs one command; a credential comes from `input` unless a file is named.
///
/// # Errors
/// What could not be read or changed. The store is as it was then.
pub(crate) fn run(
    command: &CredentialCommand,
    input: &mut io::StdinLock<'_>,
    out: &mut dyn Write,
) -> Result<(), CredentialError> {
    match command {
        CredentialCommand::Add(args) => add(args, input, out),
        CredentialCommand::List(args) => list(args, out),
        CredentialCommand::Rotate(args) => {
            let secret = secret(args.from.as_deref(), input)?;
            let SlotArgs {
                store,
                principal,
                slot,
            } = &args.slot;
            change(store, out, |stored| stored.rotate(principal, slot, secret))
        }
        CredentialCommand::Remove(args) => {
            let SlotArgs {
                store,
                principal,
                slot,
            } = &args.slot;
            change(store, out, |stored| stored.remove(principal, slot))
        }
    }
}

fn add(
    args: &AddArgs,
    input: &mut io::StdinLock<'_>,
    out: &mut dyn Write,
) -> Result<(), CredentialError> {
    let (config, plane) = load(&args.slot.store)?;
    let slot = &args.slot;
    if !is_label(&slot.slot) {
        return Err(CredentialError::Name {
            given: slot.slot.clone(),
        });
    }
    if let Some(fault) = Uses::of(&config).fault(&slot.principal, &args.route, &args.profile) {
        return Err(CredentialError::Unused { fault });
    }
    let new = Slot {
        principal: slot.principal.clone(),
        name: slot.slot.clone(),
        route: args.route.clone(),
        profile: args.profile.clone(),
        credential_revision: 0,
        route_revision: 0,
        secret: secret(args.from.as_deref(), input)?,
    };
    let key = store_key(&plane).map_err(CredentialError::Plane)?;
    let store = Store::change(&plane.store, &key, |stored| stored.add(new));
    said(out, &plane, &store.map_err(CredentialError::Store)?)
}

fn list(args: &StoreArgs, out: &mut dyn Write) -> Result<(), CredentialError> {
    let (config, plane) = load(args)?;
    let key = store_key(&plane).map_err(CredentialError::Plane)?;
    let store = Store::load(&plane.store, &key).map_err(CredentialError::Store)?;
    let uses = Uses::of(&config);
    said(out, &plane, &store)?;
    for slot in store.slots() {
        let note = match uses.fault(&slot.principal, &slot.route, &slot.profile) {
            Some(fault) => format!("  never used: {fault}"),
            None => String::new(),
        };
        let line = format!(
            "{} {}: model {}, profile {}, credential of generation {}, route of generation {}{note}",
            slot.principal,
            slot.name,
            slot.route,
            slot.profile,
            slot.credential_revision,
            slot.route_revision
        );
        writeln!(out, "{line}").map_err(|source| CredentialError::Output { source })?;
    }
    Ok(())
}

fn change(
    args: &StoreArgs,
    out: &mut dyn Write,
    change: impl FnOnce(&mut Store) -> Result<(), StoreError>,
) -> Result<(), CredentialError> {
    let (_, plane) = load(args)?;
    let key = store_key(&plane).map_err(CredentialError::Plane)?;
    let store = Store::change(&plane.store, &key, change).map_err(CredentialError::Store)?;
    said(out, &plane, &store)
}

fn load(args: &StoreArgs) -> Result<(EdgeConfig, CredentialConfig), CredentialError> {
    let config = EdgeConfig::load(&args.config).map_err(CredentialError::Config)?;
    let plane = config.credentials.clone();
    let plane = plane.ok_or_else(|| CredentialError::Off {
        config: args.config.clone(),
    })?;
    Ok((config, plane))
}

fn said(
    out: &mut dyn Write,
    plane: &CredentialConfig,
    store: &Store,
) -> Result<(), CredentialError> {
    writeln!(
        out,
        "{}: {} slots, generation {}",
        plane.store.display(),
        store.slots().len(),
        store.generation()
    )
    .map_err(|source| CredentialError::Output { source })
}

/// A credential, without the line end that editors and `echo` leave behind it.
fn secret(
    from: Option<&Path>,
    input: &mut io::StdinLock<'_>,
) -> Result<Zeroizing<Vec<u8>>, CredentialError> {
    let most = SECRET_BYTES_MAX as usize + 3; // a line end, and one byte to see that it is too long
    let mut bytes = Zeroizing::new(Vec::with_capacity(most));
    let mut read = |source: &mut dyn Read| source.take(most as u64).read_to_end(&mut bytes);
    let done = match from {
        Some(path) => File::open(path).and_then(|mut file| read(&mut file)),
        None if input.is_terminal() => return Err(CredentialError::Terminal),
        None => read(input),
    };
    done.map_err(|source| CredentialError::Read {
        from: from
            .unwrap_or_else(|| Path::new("standard input"))
            .to_owned(),
        source,
    })?;
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    Ok(bytes)
}
