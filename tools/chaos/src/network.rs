//! Network namespaces for nodes: each link a pair of virtual interfaces that can lose packets.
//!
//! Lives on: the harness, which must be root. View: one run. Bound: `SLOTS_MAX` runs on a host; what a
//! run that was killed has left behind is taken away by the next.
//!
//! ```text
//! harness's namespace                    namespace iop-chaos-SLOT-NODE
//! ic<SLOT>x<LINK>a 10.77.B.1/30 ──────── ic<SLOT>x<LINK>b 10.77.B.2/30      B = 8 SLOT + LINK
//! ```
//!
//! Behind each pair's route lies a blackhole of the same range: what is sent while the pair is down
//! leaves by no other interface of the host.
use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::process::Command;

use crate::error::Error;
use crate::plan::NODES;

/// Runs at once on one host that have interfaces of their own.
const SLOTS_MAX: u8 = 16;
/// Links of a run: two a node.
const LINKS: u8 = 2 * NODES;
/// Behind every route of a host that leads anywhere: it is met when a pair's own route is gone.
const BEHIND: &str = "4096";
/// One order to the kernel; the machine may be slow.
const ORDER_LIMIT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(5);
/// Nobody's.
const NOBODY: &str = "02:00:00:00:00:01";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Namespaces and pairs of virtual interfaces, behind relays.
    Veth,
    /// Relays alone.
    Relay,
}

impl Form {
    /// `None`: whatever the host permits.
    pub(crate) fn parse(text: &str) -> Result<Option<Self>, Error> {
        match text {
            "auto" => Ok(None),
            "veth" => Ok(Some(Self::Veth)),
            "relay" => Ok(Some(Self::Relay)),
            _ => Err(Error::Usage(format!(
                "--links: auto, veth or relay, not {text}"
            ))),
        }
    }
}

/// Namespaces of a run, gone with it.
#[derive(Debug)]
pub(crate) struct Network {
    slot: u8,
    /// Locked while the slot is ours; the kernel lets go of it with us.
    claim: File,
}

/// A link's two interfaces.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    space: String,
    near: String,
    far: String,
    /// Of the harness's end: where a relay listens.
    pub(crate) address: IpAddr,
    node_address: IpAddr,
}

impl Network {
    /// Takes a slot and makes a namespace for each node.
    pub(crate) async fn new() -> Result<Self, Error> {
        let mut taken = None;
        for slot in 0..SLOTS_MAX {
            if taken.is_some() && !Path::new(&claim_file(slot)).exists() {
                continue; // nobody was ever there
            }
            let Some(claim) = claim(slot)? else { continue };
            if taken.is_none() {
                taken = Some(Self { slot, claim });
            } // every other one was swept
        }
        let network = taken.ok_or_else(|| Error::Part("every slot is taken".to_owned()))?;
        // First of all, so that whatever of it is made is found by the next run.
        let file = claim_file(network.slot);
        fs::write(&file, std::process::id().to_string()).map_err(Error::io(file))?;
        for node in 0..NODES {
            network.space(node).await?;
        }
        Ok(network)
    }

    /// As `new`, where the host lets us have namespaces, interfaces, and a connection through them.
    pub(crate) async fn permitted() -> Option<Self> {
        let network = Self::new().await.ok()?;
        let pair = network.pair(0, 0).await.ok()?; // made anew when it is needed
        let listener = TcpListener::bind((pair.address, 0)).ok()?;
        let to = listener.local_addr().ok()?.to_string();
        let own = std::env::current_exe().ok()?;
        let own = own.display().to_string();
        let space = network.space_name(0);
        let inside = ["netns", "exec", &space, &own, "reach", &to];
        ip(&inside).await.ok()?;
        Some(network)
    }

    async fn space(&self, node: u8) -> Result<(), Error> {
        let space = self.space_name(node);
        ip(&["netns", "add", &space]).await?;
        ip(&["-n", &space, "link", "set", "lo", "up"])
            .await
            .map(drop)
    }

    pub(crate) fn space_name(&self, node: u8) -> String {
        space_name(self.slot, node)
    }

    /// Link `row` of the run, for `node`.
    pub(crate) async fn pair(&self, node: u8, row: u8) -> Result<Pair, Error> {
        assert!(row < LINKS, "a run has {LINKS} links");
        let (space, block) = (self.space_name(node), self.slot * 8 + row);
        let (near, far) = (
            format!("ic{}x{row}a", self.slot),
            format!("ic{}x{row}b", self.slot),
        );
        let [address, node_address] = [1, 2].map(|end| Ipv4Addr::new(10, 77, block, end));
        let with_mask = |address: Ipv4Addr| format!("{address}/30");
        let _none = ip(&["link", "del", &near]).await; // a slot that was just left may still have it
        self.wall(block, node_address).await?;
        let peer = ["type", "veth", "peer", "name", &far, "netns", &space];
        ip(&[&["link", "add", &near], &peer[..]].concat()).await?;
        ip(&["addr", "add", &with_mask(address), "dev", &near]).await?;
        ip(&["link", "set", &near, "up"]).await?;
        let inside = with_mask(node_address);
        ip(&["-n", &space, "addr", "add", &inside, "dev", &far]).await?;
        ip(&["-n", &space, "link", "set", &far, "up"]).await?;
        Ok(Pair {
            space,
            near,
            far,
            address: address.into(),
            node_address: node_address.into(),
        })
    }
}

impl Network {
    /// What is sent to a pair that is down goes nowhere: without, it would go where the host sends
    /// whatever it knows no better way for.
    async fn wall(&self, block: u8, node_address: Ipv4Addr) -> Result<(), Error> {
        let range = range_of(block);
        let _none = ip(&wall_order("del", &range)).await;
        for which in ["root", "match"] {
            let shown = ip(&["-4", "route", "show", "table", "all", "to", which, &range]).await?;
            if let Some(route) = shown.lines().find(|line| is_route(line)) {
                let why = format!("{range} is somebody's already: {}", route.trim());
                return Err(Error::Part(why));
            }
        }
        ip(&wall_order("add", &range)).await?;
        match ip(&["route", "get", &node_address.to_string()]).await {
            Err(_) => Ok(()),
            Ok(way) => Err(Error::Part(format!(
                "{range} is routed past a blackhole: {}",
                way.trim()
            ))),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        clear(self.slot);
        let _emptied = self.claim.set_len(0);
    }
}

impl Pair {
    /// Whether anything passes at all.
    pub(crate) async fn carry(&self, on: bool) -> Result<(), Error> {
        // The node's end keeps its address and its carrier's loss; the harness's end goes down.
        let state = if on { "up" } else { "down" };
        ip(&["link", "set", &self.near, state]).await.map(drop)
    }

    /// Whether what the node sends arrives: without, it goes to nobody's hardware address.
    pub(crate) async fn away(&self, on: bool) -> Result<(), Error> {
        let space = ["-n", &self.space];
        let address = self.address.to_string();
        reach(
            on,
            &[&space, &neighbour(on, &address, &self.far)[..]].concat(),
        )
        .await
    }

    /// Whether what is sent to the node arrives.
    pub(crate) async fn back(&self, on: bool) -> Result<(), Error> {
        let address = self.node_address.to_string();
        reach(on, &neighbour(on, &address, &self.near)).await
    }
}

/// Whoever is found again may have been forgotten meanwhile.
async fn reach(on: bool, arguments: &[&str]) -> Result<(), Error> {
    match ip(arguments).await {
        Err(_) if on => Ok(()),
        done => done.map(drop),
    }
}

fn neighbour<'a>(on: bool, address: &'a str, device: &'a str) -> Vec<&'a str> {
    if on {
        return vec!["neigh", "del", address, "dev", device];
    }
    let lost = ["lladdr", NOBODY, "nud", "permanent"];
    [&["neigh", "replace", address, "dev", device], &lost[..]].concat()
}

/// What it has said.
async fn ip(arguments: &[&str]) -> Result<String, Error> {
    let named = || format!("ip {}", arguments.join(" "));
    let mut command = Command::new("ip");
    let command = command.args(arguments).stdin(Stdio::null());
    let done = tokio::time::timeout(ORDER_LIMIT, command.kill_on_drop(true).output()).await;
    let done = done.map_err(|_| Error::Part(format!("{}: no end", named())))?;
    let done = done.map_err(Error::io("ip"))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&done.stderr);
    Err(Error::Part(format!("{}: {}", named(), why.trim())))
}

/// For those who cannot wait for a task: what came of it is of no use any more.
fn ip_at_once(arguments: &[&str]) {
    let mut command = std::process::Command::new("ip");
    let command = command.args(arguments).stdin(Stdio::null());
    let Ok(mut child) = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() else {
        return;
    };
    let began = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if began.elapsed() > ORDER_LIMIT {
            let _gone = child.kill();
        }
        std::thread::sleep(TICK);
    }
}

/// The two addresses of a pair, and nobody else's.
fn range_of(block: u8) -> String {
    format!("10.77.{block}.0/30")
}

fn wall_order<'a>(what: &'a str, range: &'a str) -> [&'a str; 6] {
    ["route", what, "blackhole", range, "metric", BEHIND]
}

/// A line of the routing table by which packets leave, and not as all others do.
fn is_route(line: &str) -> bool {
    let leads_nowhere = ["default", "blackhole", "unreachable", "prohibit", "throw"];
    let first = line.split_whitespace().next();
    first.is_some_and(|first| !leads_nowhere.contains(&first))
}

/// For `iop-chaos reach`, within a namespace: whether one connection comes about.
pub(crate) fn reach_out(address: &str) -> Result<bool, Error> {
    let address: SocketAddr = address
        .parse()
        .map_err(|_| Error::Usage(format!("no address: {address}")))?;
    let reached = TcpStream::connect_timeout(&address, ORDER_LIMIT / 2);
    reached
        .map(|_| true)
        .map_err(Error::io(address.to_string()))
}

fn space_name(slot: u8, node: u8) -> String {
    format!("iop-chaos-{slot}-{node}")
}

fn claim_file(slot: u8) -> String {
    format!("/run/iop-chaos-{slot}.pid")
}

/// `None`: it is another's. What a run has left there that is no more is taken away.
fn claim(slot: u8) -> Result<Option<File>, Error> {
    let path = claim_file(slot);
    let failed = || Error::io(path.clone());
    let mut options = File::options();
    let open = options.read(true).write(true).create(true).truncate(false);
    let mut file = open.open(&path).map_err(failed())?;
    if file.try_lock().is_err() {
        return Ok(None);
    }
    let left = file.metadata().map_err(failed())?;
    if left.len() == 0 {
        return Ok(Some(file));
    }
    clear(slot);
    file.set_len(0).map_err(failed())?;
    file.flush().map_err(failed())?;
    Ok(Some(file))
}

/// Interfaces go with their namespaces, blackholes by themselves.
fn clear(slot: u8) {
    for node in 0..NODES {
        ip_at_once(&["netns", "del", &space_name(slot, node)]);
    }
    for row in 0..LINKS {
        ip_at_once(&wall_order("del", &range_of(slot * 8 + row)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_leads_somewhere_is_told_from_one_that_does_not() {
        for line in [
            "",
            "default via 10.0.0.1 dev eth0",
            "blackhole 10.77.0.0/16 metric 4096",
            "unreachable 10.77.0.0/16",
        ] {
            assert!(!is_route(line), "{line}");
        }
        for line in [
            "10.0.0.0/8 via 10.0.0.1 dev eth0",
            "10.77.0.0/30 dev ic0x0a proto kernel scope link",
            "local 10.77.0.1 dev lo table local",
        ] {
            assert!(is_route(line), "{line}");
        }
    }

    #[test]
    fn a_wall_is_made_and_taken_away_by_the_same_words() {
        let range = range_of(9);
        let [add, del] = ["add", "del"].map(|what| wall_order(what, &range).join(" "));
        assert_eq!(add, "route add blackhole 10.77.9.0/30 metric 4096");
        assert_eq!(del, add.replace("add", "del"));
    }
}
