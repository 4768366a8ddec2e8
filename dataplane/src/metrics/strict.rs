//! A strict reader of the Prometheus text format, for tests: refuses what a scraper might guess at.
//!
//! Lives on: test threads. Bound: the text.
use std::collections::{BTreeMap, BTreeSet};

/// One sample: its labels, sorted by name, and its number as text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Family name plus suffix.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Family {
    pub help: String,
    pub kind: String,
    pub samples: Vec<Sample>,
}

/// Families by name. `Err` says the line and the fault.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    if !text.ends_with('\n') {
        return Err("the last line is not ended".into());
    }
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut series = BTreeSet::new();
    let mut current = String::new();
    for (row, line) in text.lines().enumerate() {
        let fault = |what: &str| format!("line {}: {what}: {line}", row + 1);
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or_else(|| fault("no help"))?;
            if !is_name(name, true) || help.is_empty() || families.contains_key(name) {
                return Err(fault("bad, empty or repeated HELP"));
            }
            current = name.to_owned();
            families.insert(
                current.clone(),
                Family {
                    help: help.into(),
                    ..Family::default()
                },
            );
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| fault("no type"))?;
            let family = families.get_mut(name).filter(|_| name == current);
            let family = family.ok_or_else(|| fault("TYPE without its HELP before it"))?;
            if !family.kind.is_empty() || !["counter", "gauge", "histogram"].contains(&kind) {
                return Err(fault("bad or repeated TYPE"));
            }
            family.kind = kind.into();
        } else {
            let sample = sample(line).ok_or_else(|| fault("not a sample"))?;
            let family = families
                .get_mut(&current)
                .ok_or_else(|| fault("no family"))?;
            let suffix = sample
                .name
                .strip_prefix(&current)
                .ok_or_else(|| fault("astray"))?;
            let allowed: &[&str] = match family.kind.as_str() {
                "histogram" => &["_bucket", "_sum", "_count"],
                "counter" | "gauge" => &[""],
                _ => return Err(fault("sample before TYPE")),
            };
            if !allowed.contains(&suffix) {
                return Err(fault("suffix does not fit the type"));
            }
            if !series.insert(format!("{} {:?}", sample.name, sample.labels)) {
                return Err(fault("series repeated"));
            }
            family.samples.push(sample);
        }
    }
    for (name, family) in &families {
        check(name, family)?;
    }
    Ok(families)
}

/// The one value of `name` with exactly these labels.
pub(crate) fn value(text: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let labels: BTreeMap<_, _> = labels
        .iter()
        .map(|&(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let families = parse(text).expect("well-formed");
    let mut samples = families.values().flat_map(|family| &family.samples);
    samples
        .find(|sample| sample.name == name && sample.labels == labels)
        .map(|found| found.value)
}

fn check(name: &str, family: &Family) -> Result<(), String> {
    let fault = |what: &str| Err(format!("{name}: {what}"));
    if family.samples.is_empty() {
        return fault("no sample");
    }
    if (family.kind == "counter") != name.ends_with("_total") {
        return fault("_total and counter go together");
    }
    let labels: BTreeSet<_> = family
        .samples
        .iter()
        .map(|sample| {
            sample
                .labels
                .keys()
                .filter(|label| *label != "le")
                .collect::<Vec<_>>()
        })
        .collect();
    if labels.len() != 1 {
        return fault("samples differ in label names");
    }
    let whole = |sample: &Sample| sample.value >= 0.0 && sample.value.is_finite();
    if !family.samples.iter().all(whole) {
        return fault("negative or not finite");
    }
    if family.kind == "histogram" {
        histogram(name, family)
    } else {
        Ok(())
    }
}

fn histogram(name: &str, family: &Family) -> Result<(), String> {
    let fault = |what: &str| Err(format!("{name}: {what}"));
    let mut buckets: BTreeMap<Vec<String>, Vec<(f64, f64)>> = BTreeMap::new();
    let mut counts: BTreeMap<Vec<String>, f64> = BTreeMap::new();
    for sample in &family.samples {
        let mut labels = sample.labels.clone();
        let le = labels.remove("le");
        let key: Vec<_> = labels.into_values().collect();
        match (sample.name.strip_prefix(name), le) {
            (Some("_bucket"), Some(le)) => {
                let bound = if le == "+Inf" {
                    f64::INFINITY
                } else {
                    le.parse().unwrap_or(-1.0)
                };
                buckets.entry(key).or_default().push((bound, sample.value));
            }
            (Some("_count"), None) => drop(counts.insert(key, sample.value)),
            (Some("_sum"), None) => {}
            _ => return fault("le belongs to buckets alone"),
        }
    }
    for (key, series) in &buckets {
        let ascending = series
            .windows(2)
            .all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let last = series.last().expect("entered with a bucket");
        if series[0].0 <= 0.0 || !ascending || last.0.is_finite() {
            return fault("buckets do not ascend to +Inf");
        }
        if counts.get(key) != Some(&last.1) {
            return fault("count differs from the last bucket");
        }
    }
    if buckets.len() == counts.len() {
        Ok(())
    } else {
        fault("buckets and counts differ")
    }
}

fn is_name(name: &str, colon: bool) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || (colon && c == ':');
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

fn sample(line: &str) -> Option<Sample> {
    let name_end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            if !is_name(label, false) || labels.insert(label.to_owned(), value).is_some() {
                return None;
            }
            if let Some(after) = after.strip_prefix('}') {
                rest = after;
                break;
            }
            rest = after.strip_prefix(',')?;
        }
    }
    let number = rest.strip_prefix(' ')?;
    let plain = |c: char| c.is_ascii_digit() || c == '.';
    if !is_name(name, true) || number.is_empty() || !number.chars().all(plain) {
        return None;
    }
    Some(Sample {
        name: name.into(),
        labels,
        value: number.parse().ok()?,
    })
}

/// The value up to its closing quote, unescaped, and what follows the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                '\\' => '\\',
                '"' => '"',
                'n' => '\n',
                _ => return None,
            }),
            other => value.push(other),
        }
    }
    None
}

#[test]
fn the_reader_refuses_what_is_not_the_format() {
    let good = "# HELP a_total x\n# TYPE a_total counter\na_total{b=\"c\\\"\\\\\\n\"} 1\n";
    let families = parse(good).unwrap();
    assert_eq!(families["a_total"].samples[0].labels["b"], "c\"\\\n");
    for bad in [
        "# HELP a_total x\n# TYPE a_total counter\na_total 1",
        "# TYPE a_total counter\na_total 1\n",
        "# HELP a_total x\na_total 1\n",
        "# HELP a_total x\n# TYPE a_total counter\n",
        "# HELP a_total x\n# TYPE a_total gauge\na_total 1\n",
        "# HELP a x\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a x\n# TYPE a gauge\na NaN\n",
        "# HELP a x\n# TYPE a gauge\na -1\n",
        "# HELP a x\n# TYPE a gauge\nb 1\n",
        "# HELP a x\n# TYPE a gauge\na{b=\"c\",} 1\n",
        "# HELP a x\n# TYPE a gauge\na{b=\"c\\d\"} 1\n",
        "# HELP a x\n# TYPE a gauge\na{b=\"1\"} 1\na{c=\"1\"} 1\n",
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 1\n",
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"1\"} 1\na_bucket{le=\"+Inf\"} 2\na_sum 1\na_count 1\n",
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"1\"} 1\na_sum 1\na_count 1\n",
    ] {
        assert!(parse(bad).is_err(), "accepted: {bad}");
    }
}
