//! Who a presented key is, and what it may name.
use iop_dataplane::config::ApiKey;
use iop_dataplane::keys::{Caller, KeyTable};
use iop_proto::ids::{KeyIndex, ModelIndex};
use iop_proto::reason::Reason;
use ring::digest::{SHA256, digest};

fn key(secret: &str, models: Option<&[usize]>) -> ApiKey {
    ApiKey {
        principal: "tester".into(),
        hash: digest(&SHA256, secret.as_bytes())
            .as_ref()
            .try_into()
            .unwrap(),
        models: models.map(|rows| {
            rows.iter()
                .map(|&row| ModelIndex::new(row).unwrap())
                .collect()
        }),
    }
}

#[test]
fn a_key_is_known_by_its_hash_and_nothing_else_is() {
    let secrets: Vec<String> = (0..300).map(|number| format!("sk-{number}")).collect();
    let keys: Vec<ApiKey> = secrets.iter().map(|secret| key(secret, None)).collect();
    let table = KeyTable::new(&keys);
    for (row, secret) in secrets.iter().enumerate() {
        assert_eq!(table.authenticate(secret.as_bytes()), KeyIndex::new(row));
        assert!(KeyIndex::new(row).is_some());
    }
    for stranger in ["", "sk-300", "sk-1 ", "SK-1"] {
        assert_eq!(table.authenticate(stranger.as_bytes()), None);
        assert_eq!(
            table.admit(Some(stranger.as_bytes())),
            Err(Reason::KeyMissing)
        );
    }
    // The hash itself is no key, nor is one that differs in a single bit anywhere.
    assert_eq!(table.authenticate(&keys[0].hash), None);
    for bit in 0..256 {
        let mut near = key("sk-0", None);
        near.hash[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(
            KeyTable::new(&[near]).authenticate(b"sk-0"),
            None,
            "bit {bit}"
        );
    }
    assert_eq!(table.admit(None), Err(Reason::KeyMissing));
    assert_eq!(
        table.admit(Some(b"sk-7")),
        Ok(Caller::Key(KeyIndex::new(7).unwrap()))
    );
}

#[test]
fn without_keys_everyone_is_served() {
    let open = KeyTable::new(&[]);
    let model = ModelIndex::new(4_095).unwrap();
    for presented in [None, Some(&b"anything"[..])] {
        assert_eq!(open.admit(presented), Ok(Caller::Anyone));
    }
    assert!(open.permits(Caller::Anyone, model));
}

#[test]
fn a_key_names_only_its_models() {
    let table = KeyTable::new(&[
        key("all", None),
        key("some", Some(&[0, 63, 64])),
        key("none", Some(&[])),
    ]);
    let permits = |row: usize, model: usize| {
        table.permits(
            Caller::Key(KeyIndex::new(row).unwrap()),
            ModelIndex::new(model).unwrap(),
        )
    };
    for model in 0..200 {
        assert!(permits(0, model));
        assert_eq!(permits(1, model), matches!(model, 0 | 63 | 64), "{model}");
        assert!(!permits(2, model));
    }
}

#[test]
fn debug_shows_no_hash() {
    let table = KeyTable::new(&[key("sk", None), key("sl", None)]);
    assert_eq!(format!("{table:?}"), "<2 keys>");
}
