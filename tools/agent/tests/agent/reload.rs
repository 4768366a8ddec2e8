//! Certificates that are replaced under a running agent.
use iop_agent::config::Security;
use iop_control::node::supervisor::Policy;
use iop_proto::limits::ALPN;

use crate::support::edge::{Conn, Edge, adapter, payload};
use crate::support::pki::{EDGE_ID, Leaf, NODE_ID, Pki};
use crate::support::{Agent, Log, plant, within};

const KEPT: &str = "certificates not reloaded, the old ones stay";
pub(crate) const RELOADED: &str = "certificates reloaded";

/// The first connection of an agent that trusts the Edge and that the Edge trusts.
pub(crate) async fn again(edge: &Edge) -> Conn {
    let met = async {
        loop {
            if let Ok(conn) = edge.handshake().await {
                break conn;
            }
        }
    };
    within("a good handshake", met).await
}

async fn session(edge: &Edge) -> Conn {
    let mut conn = again(edge).await;
    conn.register(payload(vec![adapter(1, 1)])).await;
    conn.acknowledge().await;
    conn
}

/// Proves [D-05], [P-73].
#[tokio::test]
async fn p73_certificate_key_and_roots_are_replaced_together_and_a_torn_pair_keeps_the_old() {
    let (log, _guard) = Log::capture();
    let (first, second, third) = (Pki::new(), Pki::new(), Pki::new());
    let directory = first.directory.clone();
    let leaf = Leaf::of(NODE_ID);
    let mut edge = Edge::with(first, &Leaf::of(EDGE_ID)).await;
    let mut config = edge.config();
    config.reconnect = Policy::new(Some(1), Some(0), Some(0.0)).unwrap();
    assert!(matches!(config.security, Security::Mutual { .. }));
    let agent = Agent::start(config);
    let conn = session(&edge).await;
    // Nothing has changed: only the order reads the files.
    agent.handle.reload();
    log.wait(RELOADED, 1).await;

    // A certificate without its key: said once for each look that was asked for; the old pair stays.
    let [cert, key, roots] = second.material(&leaf);
    plant(&directory, cert.0, &cert.1);
    agent.handle.reload();
    log.wait(KEPT, 1).await;
    drop(conn);
    let conn = session(&edge).await;
    // The rest follows, and nobody asks: the change itself is seen.
    plant(&directory, key.0, &key.1);
    plant(&directory, roots.0, &roots.1);
    log.wait(RELOADED, 2).await;
    edge.present(second.edge(&Leaf::of(EDGE_ID), &[ALPN]));
    drop(conn);
    let conn = session(&edge).await;

    // Another authority, all at once, and asked for.
    for (name, text) in third.material(&leaf) {
        plant(&directory, name, &text);
    }
    let before = log.count(RELOADED);
    agent.handle.reload();
    log.wait(RELOADED, before + 1).await;
    edge.present(third.edge(&Leaf::of(EDGE_ID), &[ALPN]));
    drop(conn);
    let conn = session(&edge).await;

    // An expired one is a bad reload, not an end: the process goes on with what it has.
    let expired = Leaf {
        years: (2020, 2021),
        ..leaf
    };
    for (name, text) in third.material(&expired) {
        plant(&directory, name, &text);
    }
    let before = log.count(KEPT);
    agent.handle.reload();
    log.wait(KEPT, before + 1).await;
    assert!(log.text().contains("the certificate has expired"));
    drop(conn);
    session(&edge).await;
    assert!(agent.is_running());
    let key = key.1.lines().nth(1).expect("a line of the key");
    assert!(!log.text().contains(key), "no key in a log");
}
