//! Network namespaces for nodes: each link a pair of virtual interfaces that can lose packets.
//!
//! Lives on: the harness, which must be root. View: one run. Bound: `SLOTS_MAX` runs on a host; what a
//! run that was killed has left behind is taken away by the next.
//!
//! ```text
//! harness's namespace                    namespace iop-chaos-SLOT-NODE
//! ic<SLOT>x<LINK>a 10.77.B.1/30 ──────── ic<SLOT>x<LINK>b 10.77.B.2/30      B = 8 SLOT + LINK
//! ```
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use crate::error::Error;
use crate::plan::NODES;

/// Runs at once on one host that have interfaces of their own.
const SLOTS_MAX: u8 = 16;
/// Links of a run: two a node.
const LINKS: u8 = 2 * NODES;
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
        let mut why = Error::Part("every slot is taken".to_owned());
        for slot in 0..SLOTS_MAX {
            clear_if_abandoned(slot).await;
            let network = Self { slot };
            match network.claim().await {
                Ok(()) => {
                    for node in 1..NODES {
                        network.space(node).await?;
                    }
                    return Ok(network);
                }
                Err(error) => {
                    core::mem::forget(network); // it is another's
                    why = error;
                }
            }
        }
        Err(why)
    }

    /// As `new`, where the host lets us have namespaces and interfaces both.
    pub(crate) async fn permitted() -> Option<Self> {
        let network = Self::new().await.ok()?;
        let _tried = network.pair(0, 0).await.ok()?; // made anew when it is needed
        Some(network)
    }

    /// The first namespace of a slot is its claim; a file beside tells whose.
    async fn claim(&self) -> Result<(), Error> {
        self.space(0).await?;
        let file = claim_file(self.slot);
        fs::write(&file, std::process::id().to_string()).map_err(Error::io(file))
    }

    async fn space(&self, node: u8) -> Result<(), Error> {
        let space = self.space_name(node);
        ip(&["netns", "add", &space]).await?;
        ip(&["-n", &space, "link", "set", "lo", "up"]).await
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

impl Drop for Network {
    fn drop(&mut self) {
        clear(self.slot);
    }
}

impl Pair {
    /// Whether anything passes at all.
    pub(crate) async fn carry(&self, on: bool) -> Result<(), Error> {
        // The node's end keeps its address and its carrier's loss; the harness's end goes down.
        let state = if on { "up" } else { "down" };
        ip(&["link", "set", &self.near, state]).await
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
        done => done,
    }
}

fn neighbour<'a>(on: bool, address: &'a str, device: &'a str) -> Vec<&'a str> {
    if on {
        return vec!["neigh", "del", address, "dev", device];
    }
    let lost = ["lladdr", NOBODY, "nud", "permanent"];
    [&["neigh", "replace", address, "dev", device], &lost[..]].concat()
}

async fn ip(arguments: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("ip");
    let done = command.args(arguments).stdin(Stdio::null()).output().await;
    let done = done.map_err(Error::io("ip"))?;
    if done.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&done.stderr);
    Err(Error::Part(format!(
        "ip {}: {}",
        arguments.join(" "),
        why.trim()
    )))
}

fn space_name(slot: u8, node: u8) -> String {
    format!("iop-chaos-{slot}-{node}")
}

fn claim_file(slot: u8) -> String {
    format!("/run/iop-chaos-{slot}.pid")
}

/// Takes away what a run has left that is no more.
async fn clear_if_abandoned(slot: u8) {
    let Ok(process) = fs::read_to_string(claim_file(slot)) else {
        return;
    };
    if !Path::new("/proc").join(process.trim()).exists() {
        clear(slot);
    }
}

/// Interfaces go with their namespaces.
fn clear(slot: u8) {
    for node in 0..NODES {
        let mut command = std::process::Command::new("ip");
        let command = command.args(["netns", "del", &space_name(slot, node)]);
        let _gone = command.stderr(Stdio::null()).status();
    }
    let _gone = fs::remove_file(claim_file(slot));
}
