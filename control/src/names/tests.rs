use super::*;

fn node(id: &str) -> NodeName {
    NodeName {
        id: id.into(),
        certificate_name: id.into(),
        config_payload: Arc::default(),
    }
}

fn provider(id: &str, on: usize) -> Arc<ProviderName> {
    Arc::new(ProviderName::new(
        id,
        NodeIndex::new(on).unwrap(),
        ProviderKind::Vllm,
        "a",
        "t",
    ))
}

fn model(name: &str, providers: &[usize]) -> ModelName {
    let row = |&row: &usize| ProviderIndex::new(row).unwrap();
    ModelName {
        name: name.into(),
        providers: providers.iter().map(row).collect(),
        long_threshold_bytes: 1,
        created: 0,
    }
}

fn table(nodes: &[&str], providers: &[(&str, usize)], models: &[(&str, &[usize])]) -> Names {
    Names {
        nodes: nodes.iter().map(|id| node(id)).collect(),
        providers: providers.iter().map(|&(id, on)| provider(id, on)).collect(),
        models: models.iter().map(|(name, of)| model(name, of)).collect(),
        queue: QueueLimits {
            waiters_max: 1,
            waiting_bytes_max: 1,
            wait_ms: 1,
            dispatch_ms: 5_000,
        },
        waits: Waits::default(),
        gone: Gone::default(),
    }
}

fn row(of: Option<NodeIndex>) -> Option<usize> {
    of.map(NodeIndex::row)
}

#[test]
fn a_successor_keeps_rows_marks_what_is_gone_and_takes_it_back() {
    let first = table(
        &["n1", "n2"],
        &[("p1", 0), ("p2", 1)],
        &[("m1", &[0, 1]), ("m2", &[1])],
    );
    // n1 is gone; n3 is new; p2 keeps its row although it is the file's first.
    let fresh = table(&["n2", "n3"], &[("p2", 0), ("p3", 1)], &[("m2", &[0, 1])]);
    let Succession { names, models } = first.succeed(&fresh).unwrap();
    assert_eq!(row(names.node_by_id(b"n1")), None);
    assert_eq!(row(names.node_by_id(b"n2")), Some(1));
    assert_eq!(row(names.node_by_id(b"n3")), Some(2));
    assert_eq!(names.node_by_certificate("n1"), None);
    assert_eq!(models, [ModelIndex::new(1).unwrap()]);
    assert_eq!(names.model_by_name(b"m1"), None);
    let m2 = names.model_by_name(b"m2").unwrap();
    let served: Vec<_> = names.model(m2).providers.iter().map(|p| p.row()).collect();
    assert_eq!(served, [1, 2], "by the successor's rows");
    let p1 = ProviderIndex::new(0).unwrap();
    assert!(!names.has_provider(p1) && !names.provider(p1).enabled);
    assert!(
        Arc::ptr_eq(&names.providers[1], &first.providers[1]),
        "what is unchanged is shared"
    );
    let back = names.succeed(&first).unwrap().names;
    assert_eq!(row(back.node_by_id(b"n1")), Some(0));
    assert!(back.has_provider(p1) && back.provider(p1).enabled);
    assert_eq!(row(back.node_by_id(b"n3")), None);
    assert_eq!(back.nodes.len(), 3, "no row is given up");
}

#[test]
fn a_certificate_name_passes_from_a_node_that_is_gone_to_another() {
    let first = table(&["n1", "n2"], &[], &[]);
    let mut fresh = table(&["n2", "n9"], &[], &[]);
    fresh.nodes[1].certificate_name = "n1".into();
    let names = first.succeed(&fresh).unwrap().names;
    assert_eq!(row(names.node_by_id(b"n9")), Some(2));
    assert_eq!(row(names.node_by_certificate("n1")), Some(2));
    assert_eq!(names.node_by_certificate("n9"), None, "the id is no name");
    let back = names.succeed(&first).unwrap().names;
    assert_eq!(row(back.node_by_certificate("n1")), Some(0));
}

#[test]
fn a_provider_that_moves_to_another_node_is_another_provider() {
    let first = table(&["n1", "n2"], &[("p", 0)], &[]);
    let fresh = table(&["n1", "n2"], &[("p", 1)], &[]);
    let names = first.succeed(&fresh).unwrap().names;
    let rows = [0, 1].map(|row| ProviderIndex::new(row).unwrap());
    assert_eq!(rows.map(|row| names.has_provider(row)), [false, true]);
    assert_eq!(rows.map(|row| names.provider(row).node.row()), [0, 1]);
}

#[test]
fn a_table_that_would_hold_too_many_rows_is_refused() {
    let ids = |from: usize, count: usize| -> Vec<String> {
        (from..from + count).map(|n| format!("n{n}")).collect()
    };
    let of = |ids: &[String]| {
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        table(&ids, &[], &[])
    };
    let max = NODES_MAX as usize;
    let first = of(&ids(0, max));
    assert!(first.succeed(&of(&ids(1, max - 1))).is_ok(), "exactly full");
    let error = first.succeed(&of(&ids(1, max))).unwrap_err();
    assert_eq!(
        (error.what, error.rows, error.rows_max),
        ("nodes", max + 1, max)
    );
    assert!(error.to_string().contains("restart"), "{error}");
}
