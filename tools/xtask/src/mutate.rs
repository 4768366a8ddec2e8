//! `mutate`: plants the changes of `mutations.toml` one by one; the named tests must turn red.
//!
//! Lives on: one thread; children take what the machine has. Bound: a deadline per build and run.
//!
//! The work is done in a copy of the tree below the target directory: edits in progress do not leak
//! in, planted ones do not leak out. First every named test must be green without any plant.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crate::claims::{Claims, Test};
use crate::error::Error;
use crate::plants::{self, Change, Plant};
use crate::process::{self, Echo, Finished};
use crate::report::{Tally, TestRun};
use crate::{loom, tree};

const LIMIT: Duration = Duration::from_secs(900);

#[derive(Debug, Default)]
pub(crate) struct Options {
    id: Option<String>,
    sample: Option<usize>,
    seed: Option<u64>,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, Error> {
        let mut options = Self::default();
        for pair in arguments.chunks(2) {
            let [name, value] = pair else {
                return Err(Error::unknown(&pair[0]));
            };
            let number = || {
                let parsed = value.parse::<u64>();
                parsed.map_err(|_| Error::Usage(format!("{name} {value}: not a number")))
            };
            match name.as_str() {
                "--id" => options.id = Some(value.clone()),
                "--sample" => options.sample = usize::try_from(number()?).ok(),
                "--seed" => options.seed = Some(number()?),
                _ => return Err(Error::unknown(name)),
            }
        }
        Ok(options)
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<Tally, Error> {
    let chosen = choose(plants::read(root)?, options);
    if chosen.is_empty() {
        return Err(Error::Step(format!("{}: nothing to plant", plants::FILE)));
    }
    let work = Work::prepare(root)?;
    let mut tally = Tally::default();
    let mut green: BTreeMap<String, bool> = BTreeMap::new();
    for plant in &chosen {
        let started = Instant::now();
        let verdict = work.judge(plant, &mut green);
        let (good, text) = match verdict {
            Ok(()) => (true, "red, as it must be".to_owned()),
            Err(error) => (false, format!("NOT PROVED: {error}")),
        };
        println!(
            "mutate: {} (line {}): {text} ({:.1?})",
            plant.id,
            plant.line,
            started.elapsed()
        );
        tally.add(Tally::of(good));
    }
    Ok(tally)
}

/// All, one id's, or a sample drawn by the seed, which is the day's unless given.
fn choose(plants: Vec<Plant>, options: &Options) -> Vec<Plant> {
    let mut chosen = plants;
    if let Some(id) = &options.id {
        chosen.retain(|plant| plant.id == *id);
    }
    let Some(sample) = options.sample else {
        return chosen;
    };
    let day = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seed = options.seed.unwrap_or(day.as_secs() / 86_400);
    println!("mutate: sample {sample} of {}, --seed {seed}", chosen.len());
    let mut state = seed;
    for place in (1..chosen.len()).rev() {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut dice = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        dice = (dice ^ (dice >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let other = (dice ^ (dice >> 31)) % (place as u64 + 1);
        chosen.swap(place, usize::try_from(other).unwrap_or(0));
    }
    chosen.truncate(sample);
    chosen
}

/// The copy of the tree and its build output.
struct Work {
    copy: PathBuf,
    build: PathBuf,
    wrappers: PathBuf,
    tests: Vec<Test>,
}

impl Work {
    fn prepare(root: &Path) -> Result<Self, Error> {
        let base = tree::target(root).join("mutate");
        let work = Self {
            copy: base.join("tree"),
            build: base.join("build"),
            wrappers: root.to_owned(),
            tests: Claims::read(root)?.tests,
        };
        let files = tree::files(root)?;
        for file in &files {
            let path = root.join(file);
            let content = std::fs::read(&path).map_err(Error::file(&path))?;
            tree::write_changed(&work.copy.join(file), &content)?;
        }
        for old in tree::files(&work.copy)? {
            if files.binary_search(&old).is_err() {
                let path = work.copy.join(&old);
                std::fs::remove_file(&path).map_err(Error::file(&path))?;
            }
        }
        Ok(work)
    }

    /// Plants, runs, takes back; an error says why the plant proves nothing.
    fn judge(&self, plant: &Plant, green: &mut BTreeMap<String, bool>) -> Result<(), Error> {
        for test in &plant.tests {
            let good = match green.get(test) {
                Some(&good) => good,
                None => {
                    let (run, _) = self.test(test, None)?;
                    run.outcome(test) == Some(true)
                }
            };
            green.insert(test.clone(), good);
            if !good {
                return Err(Error::Step(format!(
                    "`{test}` is not green without the plant"
                )));
            }
        }
        let (file, wrapper) = match &plant.change {
            Change::Cfg(cfg) => (None, Some(loom::wrapper(&self.wrappers, cfg)?)),
            Change::Replace { file, from, to } => {
                let original = tree::read(&self.copy, file)?;
                let found = original.matches(from.as_str()).count();
                if found != 1 {
                    let path = PathBuf::from(file);
                    return Err(Error::content(
                        &path,
                        0,
                        format!("holds `{from}` {found} times"),
                    ));
                }
                let path = self.copy.join(file);
                tree::write_changed(&path, original.replacen(from, to, 1).as_bytes())?;
                (Some((path, original)), None)
            }
        };
        let verdict = self.red(plant, wrapper.as_deref());
        if let Some((path, original)) = file {
            tree::write_changed(&path, original.as_bytes())?;
        }
        verdict
    }

    /// Every named test must fail, by its own word or by taking its process down.
    fn red(&self, plant: &Plant, wrapper: Option<&Path>) -> Result<(), Error> {
        for test in &plant.tests {
            let (run, done) = self.test(test, wrapper)?;
            let crashed = run.outcome(test).is_none() && done.status.is_some() && !done.success();
            if run.outcome(test) != Some(false) && !crashed {
                return Err(Error::Step(format!("`{test}` did not fail: {done}")));
            }
        }
        Ok(())
    }

    /// Builds, which must succeed, and runs one test by name.
    fn test(&self, name: &str, wrapper: Option<&Path>) -> Result<(TestRun, Finished), Error> {
        let mut places = self.tests.iter().filter(|test| test.name == name);
        let (Some(test), None) = (places.next(), places.next()) else {
            return Err(Error::Step(format!(
                "`{name}` is not the name of exactly one test"
            )));
        };
        let target = Target::of(&self.copy, &test.file)?;
        let mut command = process::cargo(&self.copy);
        command
            .arg("test")
            .args(["--package", &target.package])
            .args(&target.select);
        command.env("CARGO_TARGET_DIR", &self.build);
        if target.package == "loom-tests" {
            loom::environment(&mut command);
        }
        if let Some(wrapper) = wrapper {
            command.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
        }
        command.arg("--no-run");
        let built = process::run(&mut command, LIMIT, Echo::No)?;
        if !built.success() {
            let tail = built.tail(30);
            return Err(Error::Step(format!("does not build: {built}\n{tail}")));
        }
        let mut arguments: Vec<_> = command.get_args().map(|word| word.to_owned()).collect();
        arguments.pop();
        let mut again = process::cargo(&self.copy);
        again.args(arguments).arg(name);
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => again.env(key, value),
                None => again.env_remove(key),
            };
        }
        let done = process::run(&mut again, LIMIT, Echo::No)?;
        Ok((TestRun::read(&done.output), done))
    }
}

/// How cargo is told to build the binary that holds a test.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    package: String,
    select: Vec<String>,
}

impl Target {
    fn of(root: &Path, file: &str) -> Result<Self, Error> {
        let unplaced = || Error::content(Path::new(file), 0, "belongs to no cargo target");
        let folders = Path::new(file).ancestors().skip(1);
        let mut manifests = folders.filter(|folder| root.join(folder).join("Cargo.toml").is_file());
        let home = manifests.next().ok_or_else(unplaced)?;
        let manifest = home.join("Cargo.toml");
        let text = tree::read(root, &manifest.to_string_lossy())?;
        let package = text
            .lines()
            .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
            .ok_or_else(|| Error::content(&manifest, 0, "names no package"))?;
        let inside = Path::new(file).strip_prefix(home).map_err(|_| unplaced())?;
        let mut parts = inside
            .components()
            .map(|part| part.as_os_str().to_string_lossy());
        let select = match (parts.next().as_deref(), parts.next()) {
            (Some("src"), Some(_)) => {
                let there = |name: &str| root.join(home).join("src").join(name).is_file();
                let kinds = [("lib.rs", "--lib"), ("main.rs", "--bins")];
                kinds
                    .into_iter()
                    .filter(|(name, _)| there(name))
                    .map(|(_, kind)| kind.to_owned())
                    .collect()
            }
            (Some("tests"), Some(name)) => {
                let name = name.strip_suffix(".rs").unwrap_or(&name).to_owned();
                vec!["--test".to_owned(), name]
            }
            _ => return Err(unplaced()),
        };
        Ok(Self {
            package: package.to_owned(),
            select,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(id: &str) -> Plant {
        Plant {
            id: id.to_owned(),
            line: 1,
            change: Change::Cfg("a".to_owned()),
            tests: vec!["t".to_owned()],
        }
    }

    #[test]
    fn a_sample_is_drawn_by_its_seed_alone() {
        let all: Vec<Plant> = (0..50).map(|n| plant(&format!("R-{n:03}"))).collect();
        let draw = |seed| {
            let options = Options {
                sample: Some(5),
                seed: Some(seed),
                id: None,
            };
            choose(all.clone(), &options)
        };
        assert_eq!(draw(7).len(), 5);
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let one = Options {
            id: Some("R-003".to_owned()),
            ..Options::default()
        };
        assert_eq!(choose(all, &one), [plant("R-003")]);
    }

    #[test]
    fn a_test_is_built_by_its_place() {
        let root = tree::root();
        let target = |file: &str| Target::of(&root, file).unwrap();
        let here = target("tools/xtask/src/mutate.rs");
        assert_eq!(
            (here.package.as_str(), here.select.as_slice()),
            ("xtask", ["--bins".to_owned()].as_slice())
        );
        let ring = target("dataplane/ring/src/spsc.rs");
        assert_eq!(
            (ring.package.as_str(), ring.select.as_slice()),
            ("iop-ring", ["--lib".to_owned()].as_slice())
        );
        let loom = target("loom-tests/tests/hazards/pair.rs");
        assert_eq!(loom.package, "loom-tests");
        assert_eq!(loom.select, ["--test", "hazards"]);
        assert!(Target::of(&root, "README.md").is_err());
    }

    #[test]
    fn options_are_read_in_pairs() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let options = Options::parse(&words("--sample 3 --seed 9 --id R-001")).unwrap();
        assert_eq!((options.sample, options.seed), (Some(3), Some(9)));
        for wrong in ["--sample", "--sample x", "--what 1"] {
            assert!(Options::parse(&words(wrong)).is_err(), "{wrong}");
        }
    }
}
