//! Exit codes and signals of the agent as a process of its own: this test binary, started again.
use std::path::Path;
use std::process::Stdio;

use iop_proto::domain::{CommandKind, Message, NodeCommandRequest};
use iop_proto::limits::ALPN;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

use crate::reload::{RELOADED, again};
use crate::support::edge::{Edge, payload};
use crate::support::pki::{EDGE_ID, Leaf, NODE_ID, Pki};
use crate::support::{plant, within};

/// Names the configuration of a child.
const CONFIG: &str = "IOP_AGENT_TEST_CONFIG";

/// Not a test of its own: the process the others start. Nothing happens without its variable.
#[test]
#[expect(clippy::exit, reason = "the exit code is what the parent looks at")]
fn child() {
    if let Some(config) = std::env::var_os(CONFIG) {
        tracing_subscriber::fmt().with_ansi(false).init();
        let config = iop_agent::load(Path::new(&config)).unwrap();
        std::process::exit(iop_agent::run_blocking(config).code().into());
    }
}

fn start(directory: &Path, port: u16, lines: &str) -> Child {
    command(directory, port, lines).spawn().unwrap()
}

fn command(directory: &Path, port: u16, lines: &str) -> Command {
    let text = format!("node_id: n1\nedge:\n  address: 127.0.0.1:{port}\n{lines}");
    let text = text.replace("edge:\n", "edge:\n  trust_domain: iop.test\n  name: e1\n");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["process::child", "--exact", "--nocapture"])
        .env(CONFIG, plant(directory, "node.yaml", &text))
        .kill_on_drop(true);
    command
}

async fn exit_code(mut child: Child) -> Option<i32> {
    within("the process's exit", child.wait())
        .await
        .unwrap()
        .code()
}

async fn terminate(child: &Child) {
    signal(child, "-TERM").await;
}

async fn signal(child: &Child, signal: &str) {
    let pid = child.id().unwrap().to_string();
    let sent = Command::new("kill")
        .args([signal, &pid])
        .status()
        .await
        .unwrap();
    assert!(sent.success());
}

const UNLIMITED: &str =
    "insecure_plaintext: true\nreconnect: {max_attempts: 0, interval_sec: 3600}\n";

/// Proves.
#[tokio::test]
async fn r067_exhaustion_is_exit_code_one() {
    let pki = Pki::new();
    let dead = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let lines = "insecure_plaintext: true\nreconnect: {max_attempts: 2, interval_sec: 1}\n";
    assert_eq!(exit_code(start(&pki.directory, dead, lines)).await, Some(1));
}

/// Proves.
#[tokio::test]
async fn r068_an_unusable_identity_is_exit_code_one_and_nothing_is_dialled() {
    let pki = Pki::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    plant(&pki.directory, "ca.pem", "corrupt");
    let lines = "pki: {ca: ca.pem, certificate: node.pem, key: node.key}\n";
    assert_eq!(exit_code(start(&pki.directory, port, lines)).await, Some(1));
    assert!(futures_util::FutureExt::now_or_never(listener.accept()).is_none());
    let child = start(&pki.directory, port, UNLIMITED);
    within("a dial of a usable one", listener.accept())
        .await
        .unwrap();
    drop(child);
}

/// Proves.
#[tokio::test]
async fn r069_sigterm_is_exit_code_zero_between_attempts_and_on_the_last_one() {
    let pki = Pki::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let child = start(&pki.directory, port, UNLIMITED);
    drop(within("a dial", listener.accept()).await.unwrap());
    terminate(&child).await;
    assert_eq!(exit_code(child).await, Some(0));

    let last = "insecure_plaintext: true\nreconnect: {max_attempts: 1}\n";
    let child = start(&pki.directory, port, last);
    let silent = within("the only dial", listener.accept()).await.unwrap();
    terminate(&child).await;
    assert_eq!(exit_code(child).await, Some(0));
    drop(silent);
}

#[tokio::test]
async fn a_hangup_reads_the_certificates_again_and_ends_nothing() {
    let (first, second) = (Pki::new(), Pki::new());
    let directory = first.directory.clone();
    let mut edge = Edge::with(first, &Leaf::of(EDGE_ID)).await;
    let port = edge.listener.local_addr().unwrap().port();
    let lines = "pki: {ca: ca.pem, certificate: node.pem, key: node.key}\n\
                 reconnect: {max_attempts: 0, interval_sec: 1}\n";
    let mut command = command(&directory, port, lines);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let conn = edge.ready(payload(vec![])).await;
    // Nothing has changed: only the signal reads the files.
    signal(&child, "-HUP").await;
    let told = async {
        while let Some(line) = said.next_line().await.unwrap() {
            if line.contains(RELOADED) {
                return true;
            }
        }
        false
    };
    assert!(within("the reload", told).await);
    tokio::spawn(async move { while let Ok(Some(_)) = said.next_line().await {} });
    for (name, text) in second.material(&Leaf::of(NODE_ID)) {
        plant(&directory, name, &text);
    }
    signal(&child, "-HUP").await;
    edge.present(second.edge(&Leaf::of(EDGE_ID), &[ALPN]));
    drop(conn);
    let mut conn = again(&edge).await;
    conn.register(payload(vec![])).await;
    conn.acknowledge().await;
    let question = NodeCommandRequest {
        command_id: String::new(),
        kind: CommandKind::TransportStatus,
        adapter: String::new(),
        target: String::new(),
    };
    conn.send(0, Message::NodeCommandRequest(question)).await;
    let answer = conn.message().await.message;
    assert!(
        matches!(answer, Message::NodeCommandResponse(_)),
        "it serves"
    );
    terminate(&child).await;
    assert!(matches!(conn.message().await.message, Message::GoAway(_)));
    assert_eq!(exit_code(child).await, Some(0));
}
