//! Certificate, key and trust bundle that change under a running agent. `[D-05]` `[P-73]`
//!
//! Lives on: a task of its own; files are read on the runtime's blocking threads. View: the three
//! files. Bound: a look every `CERTIFICATE_CHECK_MS`; what cannot be used is said once and the old
//! material stays. The next dial uses what is in force; a session keeps what it began with.
use core::time::Duration;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use iop_proto::limits::CERTIFICATE_CHECK_MS;
use rustls::ClientConfig;
use rustls::pki_types::UnixTime;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::config::Security;
use crate::identity;
use crate::requests::Reloads;

/// What a look at a file shows of a change: nobody replaces a file and keeps all of it.
type Stamp = Option<(SystemTime, u64, u64)>;

/// Follows the files of `security` for ever; `inforce` is what the next dial uses.
pub(crate) async fn follow(
    security: Security,
    mut reloads: Reloads,
    inforce: watch::Sender<Option<Arc<ClientConfig>>>,
) {
    let Security::Mutual { ca, cert, key, .. } = &security else {
        return; // nothing to follow
    };
    let every = Duration::from_millis(CERTIFICATE_CHECK_MS);
    let look = || [ca, cert, key].map(|path| stamp(path));
    let mut seen = look();
    loop {
        let asked = tokio::select! {
            () = reloads.requested() => true,
            () = tokio::time::sleep(every) => false,
        };
        // Before the files are read: what changes meanwhile is seen by the next look.
        let now = look();
        if !asked && now == seen {
            continue;
        }
        seen = now;
        let security = security.clone();
        let read = spawn_blocking(move || identity::tls_config(&security, UnixTime::now()));
        match read.await {
            Ok(Ok(tls)) => {
                inforce.send_replace(tls);
                info!("certificates reloaded: the next connection uses them");
            }
            Ok(Err(error)) => warn!(%error, "certificates not reloaded, the old ones stay"),
            Err(_) => warn!("certificates not reloaded: reading them failed internally"),
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let seen = std::fs::metadata(path).ok()?;
    #[cfg(unix)]
    let inode = std::os::unix::fs::MetadataExt::ino(&seen);
    #[cfg(not(unix))]
    let inode = 0;
    Some((seen.modified().ok()?, seen.len(), inode))
}
