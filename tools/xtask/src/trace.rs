//! `trace`: how much of the contract a test claims to prove.
//!
//! Lives on: one thread. Bound: the tree.
//!
//! Fails on a claim that no test carries and on an id that nobody defined, in a comment or in the
//! mutation file. What is not claimed yet is shown, not failed.
use std::path::Path;

use crate::claims::{Claims, Ids};
use crate::error::Error;
use crate::plants::{self, Plant};
use crate::report::Tally;

pub(crate) fn run(root: &Path, missing: bool) -> Result<Tally, Error> {
    let ids = Ids::read(root)?;
    let claims = Claims::read(root)?;
    let plants = plants::read(root)?;
    let proved = claims.by_id();
    let planted = |id: &str| plants.iter().any(|plant| plant.id == id);
    println!(
        "{:22} {:>9} {:>9}",
        "claimed by a test", "claimed", "planted"
    );
    let (mut claimed_all, mut planted_all, mut total) = (0, 0, 0);
    for (group, members) in &ids.groups {
        let claimed: Vec<&String> = members
            .iter()
            .filter(|id| proved.contains_key(id.as_str()))
            .collect();
        let broken = claimed.iter().filter(|id| planted(id)).count();
        println!(
            "{group:22} {:>4}/{:<4} {broken:>9}",
            claimed.len(),
            members.len()
        );
        if missing {
            let rest = members
                .iter()
                .filter(|id| !proved.contains_key(id.as_str()));
            println!("  missing: {}", joined(rest.map(String::as_str)));
        }
        claimed_all += claimed.len();
        planted_all += broken;
        total += members.len();
    }
    println!("{:22} {claimed_all:>4}/{total:<4} {planted_all:>9}", "all");
    let unplanted = joined(proved.keys().copied().filter(|id| !planted(id)));
    if !unplanted.is_empty() {
        println!("claimed without a planted change: {unplanted}");
    }
    Ok(broken(&ids, &claims, &plants))
}

/// Claims and plants that name nothing.
fn broken(ids: &Ids, claims: &Claims, plants: &[Plant]) -> Tally {
    let proved = claims.by_id();
    let mut tally = Tally::default();
    for test in &claims.tests {
        for id in test.ids.iter().filter(|id| !ids.contains(id)) {
            println!(
                "{}:{}: `{}` claims {id}, which nobody defined",
                test.file, test.line, test.name
            );
            tally.add(Tally::of(false));
        }
    }
    for (file, line) in &claims.stray {
        println!("{file}:{line}: a claim that is not directly above a test");
        tally.add(Tally::of(false));
    }
    for plant in plants.iter().filter(|plant| !ids.contains(&plant.id)) {
        println!(
            "{}:{}: {} is defined nowhere",
            plants::FILE,
            plant.line,
            plant.id
        );
        tally.add(Tally::of(false));
    }
    for plant in plants
        .iter()
        .filter(|plant| !proved.contains_key(plant.id.as_str()))
    {
        println!(
            "{}:{}: no test claims {}",
            plants::FILE,
            plant.line,
            plant.id
        );
        tally.add(Tally::of(false));
    }
    if tally.failed == 0 {
        tally.add(Tally::of(true));
    }
    tally
}

fn joined<'a>(ids: impl Iterator<Item = &'a str>) -> String {
    ids.collect::<Vec<_>>().join(" ")
}
