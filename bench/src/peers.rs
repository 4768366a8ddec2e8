//! The proxies and tunnels people use instead: how each is configured and started.
//!
//! Lives on: the main thread. Bound: what `part.rs` says.
//!
//! Tunnels are two processes, both on the measured core. Where one can hold the other to a
//! certificate it does, with those of `Place::make_keys`.
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::part::{self, Part};
use crate::system::{MODEL, NODE, Place, Running, version};

/// Streams one HTTP/2 connection of a tunnel may carry: more than any scenario's.
const STREAMS_MAX: usize = 4_000;
/// Connections a proxy may have.
const CONNECTIONS_MAX: usize = 8_192;

/// The program is here, and new enough for what is asked of it.
pub(crate) fn is_installed(program: &str, minimum: Option<(u32, u32)>) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    found
        && minimum.is_none_or(|minimum| {
            let said = version_argument(program).map(|how| version(program.as_ref(), how));
            said.and_then(|said| numbers(&said))
                .is_some_and(|version| version >= minimum)
        })
}

/// What makes a program say its version; `None`: nothing does that soon.
pub(crate) fn version_argument(program: &str) -> Option<&'static str> {
    match program {
        "nginx" | "haproxy" => Some("-v"),
        "vllm-router" | "litellm" => None,
        _ => Some("--version"),
    }
}

/// The first `major.minor` in a line.
fn numbers(line: &str) -> Option<(u32, u32)> {
    line.split(|c: char| !c.is_ascii_digit() && c != '.')
        .find_map(|word| {
            let mut parts = word.split('.');
            Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
        })
}

/// An Envoy address.
fn envoy_address(of: SocketAddr) -> String {
    let (ip, port) = (of.ip(), of.port());
    format!("{{socket_address: {{address: {ip}, port_value: {port}}}}}")
}

/// An Envoy cluster with one endpoint; `more`: further lines of it.
fn envoy_cluster(name: &str, endpoint: SocketAddr, more: &str) -> String {
    let address = envoy_address(endpoint);
    format!(
        "  - name: {name}\n    type: STATIC\n{ENVOY_BREAKERS}{more}    load_assignment:\n      \
         cluster_name: {name}\n      endpoints:\n      \
         - lb_endpoints: [{{endpoint: {{address: {address}}}}}]\n"
    )
}

const ENVOY_BREAKERS: &str = "    circuit_breakers: {thresholds: [{max_connections: 8192, \
                              max_pending_requests: 8192, max_requests: 8192}]}\n";
const ENVOY_KINDS: &str = "type.googleapis.com/envoy.extensions";

/// The filter chain of an Envoy listener that sends everything to `cluster`.
fn envoy_chain(cluster: &str) -> String {
    let http = format!("{ENVOY_KINDS}.filters.network.http_connection_manager.v3");
    let router = format!("{ENVOY_KINDS}.filters.http.router.v3.Router");
    format!(
        "    filter_chains:\n    - filters:\n      - name: http\n        typed_config:\n          \
         \"@type\": {http}.HttpConnectionManager\n          stat_prefix: bench\n          \
         http2_protocol_options: {{max_concurrent_streams: {STREAMS_MAX}}}\n          \
         route_config:\n            virtual_hosts:\n            \
         - {{name: all, domains: [\"*\"], routes: [{{match: {{prefix: /}}, \
         route: {{cluster: {cluster}, timeout: 0s}}}}]}}\n          http_filters:\n          \
         - {{name: router, typed_config: {{\"@type\": {router}}}}}\n"
    )
}

impl Place {
    /// A proxy that was just started and will answer at `clients` under `probe`.
    fn proxy(
        &self,
        mut parts: Vec<Part>,
        clients: SocketAddr,
        probe: &str,
    ) -> Result<Running, Error> {
        let last = parts.last_mut().expect("a proxy is a process at least");
        last.wait("answer", || part::answers(clients, probe))?;
        Ok(Running::proxy(parts, clients))
    }

    fn pem(&self, name: &str) -> String {
        self.pki().join(name).display().to_string()
    }

    // ── one hop ──────────────────────────────────────────────────────────────────────────────────

    fn nginx_part(&self, name: &'static str, http: &str) -> Result<Part, Error> {
        let scratch = self.scratch.display();
        let mut text = format!(
            "daemon off;\nworker_processes 1;\nworker_rlimit_nofile 16384;\n\
             error_log stderr warn;\npid {scratch}/{name}.pid;\n\
             events {{ worker_connections {CONNECTIONS_MAX}; }}\nhttp {{\n  access_log off;\n"
        );
        let folders = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        for folder in folders {
            let line = writeln!(text, "  {folder}_temp_path {scratch}/{name}-{folder};");
            line.expect("a String takes everything");
        }
        let config = self.write(&format!("{name}.conf"), &format!("{text}{http}}}\n"))?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(config).stdout(Stdio::null());
        self.part(name, &mut command)
    }

    pub(crate) fn nginx(&self, provider: SocketAddr) -> Result<Running, Error> {
        let clients = part::free()?;
        let http = format!(
            "  upstream model {{ server {provider}; keepalive 64; }}\n  \
             server {{\n    listen {clients} backlog=4096;\n    location / {{\n      \
             proxy_pass http://model;\n{NGINX_HOP}    }}\n  }}\n"
        );
        self.proxy(vec![self.nginx_part("nginx", &http)?], clients, "/health")
    }

    fn envoy_part(&self, name: &'static str, text: &str) -> Result<Part, Error> {
        let config = self.write(&format!("{name}.yaml"), text)?;
        let mut command = Command::new("envoy");
        command.arg("-c").arg(config).stdout(Stdio::null());
        command.args(["--concurrency", "1", "--log-level", "error"]);
        self.part(name, command.arg("--disable-hot-restart"))
    }

    pub(crate) fn envoy(&self, provider: SocketAddr) -> Result<Running, Error> {
        let clients = part::free()?;
        let (front, chain) = (envoy_address(clients), envoy_chain("model"));
        let cluster = envoy_cluster("model", provider, "");
        let text = format!(
            "static_resources:\n  listeners:\n  - address: {front}\n{chain}  clusters:\n{cluster}"
        );
        self.proxy(vec![self.envoy_part("envoy", &text)?], clients, "/health")
    }

    pub(crate) fn vllm_router(&self, provider: SocketAddr) -> Result<Running, Error> {
        let clients = part::free()?;
        let mut command = Command::new("vllm-router");
        command
            .args(["--worker-urls", &format!("http://{provider}")])
            .args(["--host", "127.0.0.1", "--port", &clients.port().to_string()])
            .args(["--policy", "round_robin", "--log-level", "error"])
            .stdout(Stdio::null());
        let part = self.part("vllm-router", &mut command)?;
        self.proxy(vec![part], clients, "/health")
    }

    /// Reads each event and writes it anew.
    pub(crate) fn litellm(&self, provider: SocketAddr) -> Result<Running, Error> {
        let clients = part::free()?;
        let text = format!(
            "model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      \
             model: openai/{MODEL}\n      api_base: http://{provider}/v1\n      api_key: none\n\
             litellm_settings:\n  telemetry: false\n  request_timeout: 600\n"
        );
        let config = self.write("litellm.yaml", &text)?;
        let mut command = Command::new("litellm");
        command
            .arg("--config")
            .arg(config)
            .args(["--host", "127.0.0.1", "--port", &clients.port().to_string()])
            .args(["--num_workers", "1"])
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            // It listens on loopback, and the rig's clients have no key.
            .env(
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY",
                "true",
            )
            .env("LITELLM_LOG", "ERROR")
            .stdout(Stdio::null());
        let part = self.part("litellm", &mut command)?;
        self.proxy(vec![part], clients, "/health/liveliness")
    }

    // ── two hops ─────────────────────────────────────────────────────────────────────────────────

    /// The far side is dialled, which a node behind a firewall cannot be; so it is the server.
    pub(crate) fn nginx_pair(&self, provider: SocketAddr) -> Result<Running, Error> {
        let [clients, between] = [part::free()?, part::free()?];
        let (ca, pki) = (self.pem("ca.crt"), self.pki());
        let pki = pki.display();
        // The certificates name workloads, not hosts: the near side cannot match the far one's name.
        let near = format!(
            "  upstream far {{ server {between}; keepalive 1024; }}\n  \
             server {{\n    listen {clients} backlog=4096;\n    location / {{\n      \
             proxy_pass https://far;\n      proxy_ssl_protocols TLSv1.3;\n      \
             proxy_ssl_certificate {pki}/{NODE}.crt;\n      \
             proxy_ssl_certificate_key {pki}/{NODE}.key;\n{NGINX_HOP}    }}\n  }}\n"
        );
        let far = format!(
            "  upstream model {{ server {provider}; keepalive 64; }}\n  \
             server {{\n    listen {between} ssl backlog=4096;\n    ssl_protocols TLSv1.3;\n    \
             ssl_certificate {pki}/edge-1.crt;\n    ssl_certificate_key {pki}/edge-1.key;\n    \
             ssl_client_certificate {ca};\n    ssl_verify_client on;\n    location / {{\n      \
             proxy_pass http://model;\n{NGINX_HOP}    }}\n  }}\n"
        );
        let far = self.nginx_part("nginx-far", &far)?;
        let near = self.nginx_part("nginx-near", &near)?;
        self.proxy(vec![far, near], clients, "/health")
    }

    /// The node's side dials; streams are HTTP/2 streams of that one connection.
    pub(crate) fn haproxy_reverse(&self, provider: SocketAddr) -> Result<Running, Error> {
        let [clients, nodes] = [part::free()?, part::free()?];
        let ca = self.pem("ca.crt");
        // Without `http-no-delay` events wait for more of them, 100 ms and longer.
        let global = format!(
            "global\n  nbthread 1\n  maxconn {CONNECTIONS_MAX}\n  expose-experimental-directives\n  \
             ssl-load-extra-del-ext\n  tune.h2.fe.max-concurrent-streams {STREAMS_MAX}\n  \
             tune.h2.be.max-concurrent-streams {STREAMS_MAX}\ndefaults\n  mode http\n  \
             option http-no-delay\n  http-reuse always\n  timeout connect 10s\n  \
             timeout client 600s\n  timeout server 600s\n"
        );
        let near = format!(
            "{global}frontend clients\n  bind {clients} backlog 4096\n  default_backend tunnel\n\
             backend tunnel\n  server node rhttp@\n\
             frontend nodes\n  bind {nodes} ssl crt {} ca-file {ca} verify required alpn h2\n  \
             tcp-request session attach-srv tunnel/node\n",
            self.pem("edge-1.crt")
        );
        let far = format!(
            "{global}frontend tunnel\n  bind rhttp@edge/edge nbconn 1\n  default_backend model\n\
             backend edge\n  server edge {nodes} ssl crt {} ca-file {ca} verify required alpn h2\n\
             backend model\n  server model {provider}\n",
            self.pem(&format!("{NODE}.crt"))
        );
        let near = self.haproxy_part("haproxy-edge", &near)?;
        let far = self.haproxy_part("haproxy-node", &far)?;
        self.proxy(vec![near, far], clients, "/health")
    }

    fn haproxy_part(&self, name: &'static str, text: &str) -> Result<Part, Error> {
        let config = self.write(&format!("{name}.cfg"), text)?;
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(config);
        self.part(name, command.stdout(Stdio::null()))
    }

    /// The node's side dials; streams are HTTP/2 streams of that one connection.
    pub(crate) fn envoy_tunnel(&self, provider: SocketAddr) -> Result<Running, Error> {
        let [clients, nodes] = [part::free()?, part::free()?];
        let tunnel = format!("{ENVOY_KINDS}.bootstrap.reverse_tunnel");
        let tls = format!("{ENVOY_KINDS}.transport_sockets.tls.v3");
        let common = |name: &str| {
            let file = |name: &str| format!("{{filename: {}}}", self.pem(name));
            let (certificate, key) = (file(&format!("{name}.crt")), file(&format!("{name}.key")));
            let ca = file("ca.crt");
            format!(
                "common_tls_context: {{tls_certificates: [{{certificate_chain: {certificate}, \
                 private_key: {key}}}], validation_context: {{trusted_ca: {ca}}}}}"
            )
        };
        let near = format!(
            "node: {{id: edge, cluster: edges}}\nbootstrap_extensions:\n\
             - name: envoy.bootstrap.reverse_tunnel.upstream_socket_interface\n  typed_config: \
             {{\"@type\": {tunnel}.upstream_socket_interface.v3.UpstreamReverseConnectionSocketInterface}}\n\
             static_resources:\n  listeners:\n  - address: {}\n    filter_chains:\n    \
             - filters:\n      - name: envoy.filters.network.reverse_tunnel\n        typed_config: \
             {{\"@type\": {ENVOY_KINDS}.filters.network.reverse_tunnel.v3.ReverseTunnel}}\n      \
             transport_socket:\n        name: tls\n        typed_config: \
             {{\"@type\": {tls}.DownstreamTlsContext, require_client_certificate: true, {}}}\n  \
             - address: {}\n{}  clusters:\n  - name: tunnel\n    lb_policy: CLUSTER_PROVIDED\n\
             {ENVOY_BREAKERS}    cluster_type:\n      name: envoy.clusters.reverse_connection\n      \
             typed_config: {{\"@type\": \
             {ENVOY_KINDS}.clusters.reverse_connection.v3.ReverseConnectionClusterConfig, \
             host_id_format: {NODE}}}\n    typed_extension_protocol_options:\n      \
             envoy.extensions.upstreams.http.v3.HttpProtocolOptions:\n        \
             \"@type\": {ENVOY_KINDS}.upstreams.http.v3.HttpProtocolOptions\n        \
             explicit_http_config: \
             {{http2_protocol_options: {{max_concurrent_streams: {STREAMS_MAX}}}}}\n",
            envoy_address(nodes),
            common("edge-1"),
            envoy_address(clients),
            envoy_chain("tunnel"),
        );
        let dial = format!(
            "    transport_socket:\n      name: tls\n      typed_config: \
             {{\"@type\": {tls}.UpstreamTlsContext, {}}}\n",
            common(NODE)
        );
        let far = format!(
            "node: {{id: {NODE}, cluster: nodes}}\nbootstrap_extensions:\n\
             - name: envoy.bootstrap.reverse_tunnel.downstream_socket_interface\n  typed_config: \
             {{\"@type\": {tunnel}.downstream_socket_interface.v3.DownstreamReverseConnectionSocketInterface}}\n\
             static_resources:\n  listeners:\n  - name: tunnel\n    listener_filters_timeout: 0s\n    \
             address: {{socket_address: {{address: \"rc://{NODE}:nodes:bench@edge:1\", \
             port_value: 0, resolver_name: envoy.resolvers.reverse_connection}}}}\n{}  clusters:\n{}{}",
            envoy_chain("model"),
            envoy_cluster("edge", nodes, &dial),
            envoy_cluster("model", provider, ""),
        );
        let near = self.envoy_part("envoy-edge", &near)?;
        let far = self.envoy_part("envoy-node", &far)?;
        self.proxy(vec![near, far], clients, "/health")
    }

    /// The node's side dials, a connection a client connection; encrypted, and the near side alone
    /// is authenticated.
    pub(crate) fn rathole(&self, provider: SocketAddr) -> Result<Running, Error> {
        let [clients, nodes] = [part::free()?, part::free()?];
        let keys = Command::new("rathole").arg("--genkey").output();
        let keys = keys.map_err(Error::io("rathole --genkey"))?;
        let said = String::from_utf8_lossy(&keys.stdout);
        let under = |title: &str| {
            let mut lines = said.lines().skip_while(|line| !line.starts_with(title));
            let key = lines.nth(1).map(str::trim);
            key.ok_or_else(|| Error::part(format!("rathole --genkey: no {title}")))
        };
        let (private, public) = (under("Private Key")?, under("Public Key")?);
        let near = format!(
            "[server]\nbind_addr = \"{nodes}\"\ndefault_token = \"bench\"\n\
             [server.transport]\ntype = \"noise\"\n\
             [server.transport.noise]\nlocal_private_key = \"{private}\"\n\
             [server.services.model]\nbind_addr = \"{clients}\"\n"
        );
        let far = format!(
            "[client]\nremote_addr = \"{nodes}\"\ndefault_token = \"bench\"\n\
             [client.transport]\ntype = \"noise\"\n\
             [client.transport.noise]\nremote_public_key = \"{public}\"\n\
             [client.services.model]\nlocal_addr = \"{provider}\"\n"
        );
        let run = |name: &'static str, side: &str, config: PathBuf| {
            let mut command = Command::new("rathole");
            command.arg(side).arg(config).env("RUST_LOG", "error");
            self.part(name, command.stdout(Stdio::null()))
        };
        let near = run(
            "rathole-edge",
            "--server",
            self.write("rathole-edge.toml", &near)?,
        )?;
        let far = run(
            "rathole-node",
            "--client",
            self.write("rathole-node.toml", &far)?,
        )?;
        self.proxy(vec![near, far], clients, "/health")
    }
}

/// How an nginx location hands on a stream.
const NGINX_HOP: &str = "      proxy_http_version 1.1;\n      \
                         proxy_set_header Connection \"\";\n      proxy_buffering off;\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_found_in_what_programs_say() {
        for (line, version) in [
            ("nginx version: nginx/1.22.1", (1, 22)),
            (
                "HAProxy version 3.0.11-1 2025/06/26 - https://haproxy.org/",
                (3, 0),
            ),
            (
                "envoy  version: 3b1e/1.40.0/Clean/RELEASE/BoringSSL",
                (1, 40),
            ),
        ] {
            assert_eq!(numbers(line), Some(version), "{line}");
        }
        assert_eq!(numbers("none"), None);
        assert!((2, 6) < (2, 9) && (2, 9) < (3, 0));
    }
}
