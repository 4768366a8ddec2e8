//! Payloads as a whole: what is refused, what is kept, what an instance becomes.
use super::*;
use iop_proto::domain::{AdapterKind, AdapterOptions};

fn http() -> ProviderHttp {
    ProviderHttp {
        connect_timeout: Duration::from_secs(1),
        pool_idle: Duration::from_millis(9_000),
        ca: None,
    }
}

fn adapter(name: &str, kind: ProviderKind, capacity: i32) -> Adapter {
    Adapter::new(
        name.to_owned(),
        kind,
        capacity,
        "http://127.0.0.1:1/v1".to_owned(),
    )
}

fn judge(adapters: Vec<Adapter>, descriptors: Option<u64>) -> Result<Plans, ApplyError> {
    Plans::judge(
        &NodeConfig {
            adapters,
            concurrency: 0,
        },
        &http(),
        descriptors,
    )
}

fn refused(adapters: Vec<Adapter>) -> String {
    judge(adapters, None).unwrap_err().to_string()
}

#[test]
fn an_empty_name_is_the_types_and_two_of_one_name_are_refused() {
    let vllm = |name| adapter(name, ProviderKind::Vllm, 1);
    let plans = judge(vec![vllm(""), vllm("b")], None).unwrap();
    assert_eq!(
        plans.capacities().collect::<Vec<_>>(),
        [("vllm", 1), ("b", 1)]
    );
    assert_eq!(
        refused(vec![vllm(""), vllm("vllm")]),
        "adapter vllm: named twice"
    );
    let other = adapter("vllm", ProviderKind::OpenAiCompat, 1);
    assert_eq!(refused(vec![other, vllm("")]), "adapter vllm: named twice");
}

#[test]
fn each_fault_of_an_adapter_is_named_with_it() {
    let good = || adapter("a", ProviderKind::OpenAiCompat, 1);
    let with = |options| Adapter { options, ..good() };
    for (bad, expected) in [
        (
            Adapter {
                kind: AdapterKind::Other("x".into()),
                ..good()
            },
            "unknown type",
        ),
        (
            Adapter {
                settings: None,
                ..good()
            },
            "no settings of its type",
        ),
        (
            Adapter {
                settings: Some(ProviderKind::Vllm),
                ..good()
            },
            "settings of another type",
        ),
        (adapter("a", ProviderKind::Vllm, -1), "negative capacity"),
        (
            Adapter {
                base_url: "nowhere".into(),
                ..good()
            },
            "base_url is not a URL",
        ),
        (
            with(AdapterOptions {
                on_cancel: OnCancel::Other("x".into()),
                ..Default::default()
            }),
            "on_cancel is neither abort nor drain",
        ),
    ] {
        assert_eq!(refused(vec![bad]), format!("adapter a: {expected}"));
    }
}

#[test]
fn every_slot_needs_a_descriptor() {
    let slots = |count| vec![adapter("a", ProviderKind::Vllm, count)];
    assert!(judge(slots(960), Some(1_024)).is_ok());
    let error = judge(slots(961), Some(1_024)).unwrap_err().to_string();
    assert!(
        error.starts_with("1025 open files may be needed, the limit is 1024"),
        "{error}"
    );
    assert!(
        judge(slots(i32::MAX), None).is_ok(),
        "unknown limit: nothing to judge"
    );
}

#[test]
fn idle_connections_live_as_configured_and_vllms_never_past_its_own_close() {
    let idle = |kind, pool_idle_ms| {
        let options = AdapterOptions {
            pool_idle_ms,
            ..AdapterOptions::default()
        };
        let plan = Plan::judge(
            &Adapter {
                options,
                ..adapter("a", kind, 1)
            },
            &http(),
        )
        .unwrap();
        plan.options.pool_idle.as_millis()
    };
    assert_eq!(idle(ProviderKind::OpenAiCompat, 0), 9_000);
    assert_eq!(idle(ProviderKind::Vllm, 0), 3_500);
    assert_eq!(idle(ProviderKind::Vllm, 60_000), 60_000);
}

#[test]
fn an_unchanged_instance_keeps_running_and_a_changed_one_is_another() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut adapters = Adapters::default();
    let start = |adapters: &mut Adapters, capacity| {
        let a = adapter("a", ProviderKind::Vllm, 1);
        let b = adapter("b", ProviderKind::Vllm, capacity);
        adapters.start(judge(vec![a, b], None).unwrap()).unwrap();
        (
            adapters.get("a").unwrap().clone(),
            adapters.get("b").unwrap().clone(),
        )
    };
    let (a, b) = start(&mut adapters, 1);
    let (same, changed) = start(&mut adapters, 2);
    assert!(Arc::ptr_eq(&a, &same) && !Arc::ptr_eq(&b, &changed));
    adapters.start(judge(vec![], None).unwrap()).unwrap();
    assert!(adapters.get("a").is_none() && adapters.len() == 0);
}

#[test]
fn this_process_has_a_descriptor_limit_where_there_is_proc() {
    if cfg!(target_os = "linux") {
        assert!(descriptor_limit().unwrap() > 0);
    }
}
