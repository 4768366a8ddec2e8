//! Every input in `corpus/`, one test a target: valid ones, hostile ones, and those that once failed.
//!
//! Lives on: test threads. Bound: the files of the tree.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper's panic is its test's failure; the counts are the result"
)]
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use iop_fuzz::{TARGETS, Target};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn every_target_has_its_folder_and_every_folder_its_target() {
    let mut targets: Vec<_> = TARGETS
        .iter()
        .map(|target| target.name.to_owned())
        .collect();
    targets.sort();
    assert_eq!(names(&corpus()), targets);
}

/// Runs all inputs of a target; some must be accepted and some refused, else they show little.
fn replay(name: &str) {
    let target = Target::find(name).unwrap();
    let folder = corpus().join(name);
    let (mut accepted, mut refused) = (0, 0);
    for file in names(&folder) {
        let data = fs::read(folder.join(&file)).unwrap();
        match catch_unwind(|| (target.run)(&data)) {
            Ok(true) => accepted += 1,
            Ok(false) => refused += 1,
            Err(_) => panic!("{name}: {file} fails; the panic is above"),
        }
    }
    println!("{name}: {accepted} inputs accepted, {refused} refused");
    assert!(
        accepted >= 3 && refused >= 3,
        "{accepted} accepted, {refused} refused"
    );
}

macro_rules! replays {
    ($($name:ident)*) => {
        mod replays {
            $(#[test]
            fn $name() {
                super::replay(stringify!($name));
            })*
        }

        #[test]
        fn no_target_is_left_out() {
            let replayed = [$(stringify!($name)),*];
            assert!(TARGETS.iter().all(|target| replayed.contains(&target.name)));
        }
    };
}

replays! { head chunked splice framing views record response tools edge_yaml node_yaml }
