//! The credential plane of `edge.yaml`: whether there is one, where its files are, and what a catalog
//! must look like for it.
//!
//! Lives on: the cold thread. View: one file. Bound: as the tree it reads.
use std::path::{Path, PathBuf};

use iop_control::names::Names;
use iop_proto::limits as bounds;

use super::CredentialConfig;
use super::read::{Listeners, file};
use super::tree::{Field, Group};
use crate::credential::KeySource;

pub(super) const FIELDS: &[&str] = &[
    "store",
    "store_key_file",
    "store_key_env",
    "store_key_systemd",
    "issuer_key",
    "lease_ms",
];

/// `None`: the plane is off, or a complaint was made. `[D-37]`
pub(super) fn read(
    root: &Group<'_>,
    directory: &Path,
    listeners: &Listeners<'_>,
    names: &Names,
    recipients: Vec<Option<PathBuf>>,
) -> Option<CredentialConfig> {
    let switch = root.get("credential_plane")?;
    if !switch.word(&[("off", false), ("on", true)])? {
        return None;
    }
    if listeners.insecure_plaintext_nodes {
        switch.complain("on needs nodes that prove who they are: not insecure_plaintext_nodes");
    }
    check_models(root, names);
    check_nodes(root, names, &recipients);
    let group = root.require("credentials")?.group(FIELDS)?;
    let path = |name| {
        group
            .require(name)
            .and_then(|field| file(&field, directory))
    };
    let (store, issuer_key) = (path("store"), path("issuer_key"));
    let store_key = store_key(&group, directory);
    let lease = 1_000..=bounds::LEASE_MS_MAX;
    let lease_ms = group.whole("lease_ms", lease, "milliseconds", bounds::LEASE_MS_DEFAULT);
    Some(CredentialConfig {
        store: store?,
        store_key: store_key?,
        issuer_key: issuer_key?,
        lease_ms,
        recipients,
    })
}

/// Exactly one place.
fn store_key(group: &Group<'_>, directory: &Path) -> Option<KeySource> {
    let name = |field: Field<'_>| field.text().map(str::to_owned);
    let mut sources = [
        group
            .get("store_key_file")
            .map(|field| file(&field, directory).map(KeySource::File)),
        group
            .get("store_key_env")
            .map(|field| name(field).map(KeySource::Environment)),
        group
            .get("store_key_systemd")
            .map(|field| name(field).map(KeySource::Systemd)),
    ]
    .into_iter()
    .flatten();
    let (first, second) = (sources.next(), sources.next());
    if first.is_none() || second.is_some() {
        group
            .place()
            .complain("expected one of store_key_file, store_key_env, store_key_systemd");
        return None;
    }
    first.flatten()
}

/// With the plane on every tunnel carries a credential, and a run carries none: one model's requests
/// do the one or the other. `[A-37]` `[I6.3]`
fn check_models(root: &Group<'_>, names: &Names) {
    for item in root.list("models") {
        let Some(model) = item
            .peek("name")
            .and_then(|field| names.model_by_name(field.scalar()?.as_bytes()))
        else {
            continue;
        };
        let providers = names.model(model).providers.iter();
        let kinds = providers.map(|&provider| names.provider(provider).kind.is_tunnel());
        let (tunnels, runs): (Vec<_>, Vec<_>) = kinds.partition(|&is_tunnel| is_tunnel);
        if !tunnels.is_empty() && !runs.is_empty() {
            item.complain(
                "credential_plane: on, and its providers are of both kinds, those that take a \
                 credential and those that cannot (ollama)",
            );
        }
    }
}

/// A tunnel provider's node needs a key to seal to, and its adapter a header to put it in.
fn check_nodes(root: &Group<'_>, names: &Names, recipients: &[Option<PathBuf>]) {
    for item in root.list("nodes") {
        let id = item.peek("id").and_then(|field| field.scalar());
        let Some(node) = id.and_then(|id| names.node_by_id(id.as_bytes())) else {
            continue;
        };
        let mut providers = names.providers.iter();
        let serves = providers.any(|provider| provider.node == node && provider.kind.is_tunnel());
        if serves && recipients.get(node.row()).is_none_or(Option::is_none) {
            item.complain("credential_plane: on, and it has no recipient_key");
        }
        let adapters = item.peek("adapters").map(|field| field.list());
        for adapter in adapters.unwrap_or_default() {
            let kind = adapter.peek("type").and_then(|field| field.scalar());
            let is_tunnel = kind
                .and_then(iop_proto::catalog::ProviderKind::from_name)
                .is_some_and(|kind| kind.is_tunnel());
            if is_tunnel && adapter.peek("profile").is_none() {
                adapter.complain(
                    "credential_plane: on, and it has no profile, which declares the header a \
                     credential goes to",
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EdgeConfig, Host};

    const MANAGED: &str = "\
pki: {trust_domain: iop.test, edge_name: e, ca: ca.crt, certificate: e.crt, key: e.key}
credential_plane: on
credentials:
  store: slots
  store_key_file: /abs/store.key
  issuer_key: pki/e.issuer.key
nodes:
  - id: n1
    recipient_key: pki/n1.recipient.pub
    adapters:
      - name: a1
        type: openai_compat
        base_url: https://host.example
        profile: {id: openai, operations: [chat_completions]}
      - type: ollama
        base_url: http://127.0.0.1:11434
    providers:
      - {id: p1, adapter: a1, target: t1, capacity: 1}
      - {id: p2, adapter: ollama, target: t2, capacity: 1}
models:
  - {name: m1, providers: [p1]}
  - {name: m2, providers: [p2]}
";

    fn parse(text: &str) -> Result<EdgeConfig, crate::config::ConfigError> {
        let host = Host {
            memory_bytes: None,
            cores: Vec::new(),
        };
        EdgeConfig::parse_for(text, "dir/edge.yaml", &host)
    }

    #[test]
    fn a_managed_configuration_names_its_files() {
        let plane = parse(MANAGED).unwrap().credentials.unwrap();
        let expected = CredentialConfig {
            store: "dir/slots".into(),
            store_key: KeySource::File("/abs/store.key".into()),
            issuer_key: "dir/pki/e.issuer.key".into(),
            lease_ms: 60_000,
            recipients: vec![Some("dir/pki/n1.recipient.pub".into())],
        };
        assert_eq!(plane, expected);
        let off = MANAGED.replace("credential_plane: on", "credential_plane: off");
        assert!(parse(&off).unwrap().credentials.is_none());
        let file = "store_key_file: /abs/store.key";
        let named = |line: &str| {
            let plane = parse(&MANAGED.replace(file, line)).unwrap().credentials;
            plane.unwrap().store_key
        };
        let environment = KeySource::Environment("IOP_KEY".to_owned());
        assert_eq!(named("store_key_env: IOP_KEY"), environment);
        let systemd = KeySource::Systemd("store".to_owned());
        assert_eq!(named("store_key_systemd: store"), systemd);
        let longest = MANAGED.replace("  store:", "  lease_ms: 300_000\n  store:");
        let plane = parse(&longest).unwrap().credentials.unwrap();
        assert_eq!(plane.lease_ms, 300_000);
    }

    /// Proves, [D-37]. The role that a managed node must have is not configured: it is `node`.
    #[test]
    fn r009_a_managed_edge_has_an_identity_and_expects_a_name_of_each_node() {
        let config = parse(MANAGED).unwrap();
        assert_eq!(
            config.names.nodes[0].certificate_name, "n1",
            "its id, unless another is said"
        );
        let pki =
            "{trust_domain: iop.test, edge_name: e, ca: ca.crt, certificate: e.crt, key: e.key}";
        let cases = [
            (format!("pki: {pki}\n"), "", "pki: is required"),
            (
                ", certificate: e.crt".to_owned(),
                "",
                "pki.certificate: is required",
            ),
            (", key: e.key".to_owned(), "", "pki.key: is required"),
            (", ca: ca.crt".to_owned(), "", "pki.ca: is required"),
            (
                " edge_name: e,".to_owned(),
                "",
                "pki.edge_name: is required",
            ),
            (
                "trust_domain: iop.test, ".to_owned(),
                "",
                "pki.trust_domain: is required",
            ),
            (
                "  - id: n1\n".to_owned(),
                "  - id: n1\n    name: ''\n",
                "nodes[0].name: ",
            ),
            (
                "pki: {".to_owned(),
                "listeners: {insecure_plaintext_nodes: true}\npki: {",
                "credential_plane: on needs nodes that prove who they are",
            ),
        ];
        for (old, new, expected) in cases {
            assert_eq!(MANAGED.matches(&old).count(), 1, "{old}");
            let error = parse(&MANAGED.replace(&old, new)).unwrap_err();
            assert!(error.to_string().contains(expected), "{expected}: {error}");
        }
        let unmanaged = MANAGED.split_once("credential_plane: on").unwrap().0;
        assert!(
            parse(unmanaged).unwrap().credentials.is_none(),
            "off unless it is said"
        );
    }

    /// Proves.
    #[test]
    fn r211_what_no_managed_edge_can_run_with_is_refused_with_its_place() {
        assert!(parse(MANAGED).is_ok());
        let managed = |old: &str, new: &str| {
            assert_eq!(MANAGED.matches(old).count(), 1, "{old}");
            MANAGED.replace(old, new)
        };
        let cases = [
            (
                managed("  store:", "  lease_ms: 300_001\n  store:"),
                ":4: credentials.lease_ms: expected a whole number of milliseconds from 1000 to 300000",
            ),
            (
                managed("pki:", "listeners: {insecure_plaintext_nodes: true}\npki:"),
                ":3: credential_plane: on needs nodes that prove who they are",
            ),
            (
                managed("providers: [p1]", "providers: [p1, p2]"),
                ":21: models[0]: credential_plane: on, and its providers are of both kinds",
            ),
            (
                managed("    recipient_key: pki/n1.recipient.pub\n", ""),
                ":8: nodes[0]: credential_plane: on, and it has no recipient_key",
            ),
            (
                managed(
                    "        profile: {id: openai, operations: [chat_completions]}\n",
                    "",
                ),
                ":11: nodes[0].adapters[0]: credential_plane: on, and it has no profile",
            ),
            (
                managed("  store_key_file: /abs/store.key\n", ""),
                ":4: credentials: expected one of store_key_file, store_key_env",
            ),
            (
                managed("  store:", "  store_key_env: K\n  store:"),
                ":4: credentials: expected one of store_key_file, store_key_env",
            ),
            (
                managed("  issuer_key: pki/e.issuer.key\n", ""),
                ":4: credentials.issuer_key: is required",
            ),
        ];
        for (text, expected) in cases {
            let error = parse(&text).unwrap_err();
            assert_eq!(error.problems.len(), 1, "{error}");
            assert!(error.to_string().contains(expected), "{expected}: {error}");
        }
    }
}
