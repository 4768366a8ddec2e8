//! `docs/contract/mutations.toml`: per claimed id the planted changes that must turn its tests red.
//!
//! Lives on: one thread. Bound: the file.
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use crate::error::Error;
use crate::{rust_text, tree};

pub(crate) const FILE: &str = "docs/contract/mutations.toml";

/// One planted change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plant {
    pub id: String,
    /// Where its table begins.
    pub line: usize,
    pub change: Change,
    /// Names of test functions; each must fail.
    pub tests: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A `--cfg` for the workspace's own crates.
    Cfg(String),
    /// Text that stands once in a file, and what replaces it.
    Replace {
        file: String,
        from: String,
        to: String,
    },
}

pub(crate) fn read(root: &Path) -> Result<Vec<Plant>, Error> {
    parse(&tree::read(root, FILE)?)
}

fn parse(text: &str) -> Result<Vec<Plant>, Error> {
    let path = PathBuf::from(FILE);
    let document = DeTable::parse(text).map_err(|error| {
        let line = error
            .span()
            .map_or(0, |span| rust_text::line_of(text, span.start));
        Error::content(&path, line, error.message())
    })?;
    let mut plants = Vec::new();
    for (id, value) in document.get_ref() {
        let at = |offset| rust_text::line_of(text, offset);
        let broken = |offset, why: String| Error::content(&path, at(offset), why);
        let tables: Vec<_> = match value.get_ref() {
            DeValue::Table(table) => vec![(value.span().start, table)],
            DeValue::Array(array) => {
                let table = |item: &'_ toml::Spanned<DeValue<'_>>| item.span().start;
                let starts: Vec<usize> = array.iter().map(table).collect();
                let tables = array.iter().filter_map(|item| item.get_ref().as_table());
                starts.into_iter().zip(tables).collect()
            }
            _ => {
                return Err(broken(
                    value.span().start,
                    format!("`{}` is no table", id.get_ref()),
                ));
            }
        };
        for (start, table) in tables {
            let plant = plant(id.get_ref(), at(start), table);
            plants.push(plant.map_err(|why| broken(start, format!("{}: {why}", id.get_ref())))?);
        }
    }
    plants.sort_by_key(|plant| plant.line);
    Ok(plants)
}

fn plant(id: &str, line: usize, table: &DeTable<'_>) -> Result<Plant, String> {
    let known = |name: &&str| ["cfg", "replace", "tests"].contains(name);
    if let Some(other) = table
        .keys()
        .map(|key| key.get_ref().as_ref())
        .find(|key| !known(key))
    {
        return Err(format!("`{other}` is not known here: cfg, replace, tests"));
    }
    let replace = table.get("replace").map(|value| value.get_ref());
    let change = match (table.get("cfg"), replace) {
        (Some(_), None) => Change::Cfg(text(table, "cfg")?),
        (None, Some(DeValue::Table(inner))) => Change::Replace {
            file: text(inner, "file")?,
            from: text(inner, "from")?,
            to: text(inner, "to")?,
        },
        _ => return Err("says exactly one of `cfg` and `replace = { file, from, to }`".to_owned()),
    };
    if let Change::Cfg(cfg) = &change
        && cfg.contains(['\'', '\n'])
    {
        return Err(format!(
            "`cfg = {cfg}` holds a single quote or a line break"
        ));
    }
    let tests = match table.get("tests").map(|value| value.get_ref()) {
        Some(DeValue::Array(names)) => names
            .iter()
            .map(|name| {
                name.get_ref()
                    .as_str()
                    .map(str::to_owned)
                    .ok_or("a test is no text")
            })
            .collect::<Result<Vec<String>, &str>>()?,
        _ => Vec::new(),
    };
    if tests.is_empty() {
        return Err("`tests` names no test".to_owned());
    }
    Ok(Plant {
        id: id.to_owned(),
        line,
        change,
        tests,
    })
}

fn text(table: &DeTable<'_>, key: &str) -> Result<String, String> {
    let value = table.get(key).and_then(|value| value.get_ref().as_str());
    value
        .map(str::to_owned)
        .ok_or_else(|| format!("`{key}` is missing or no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_change_are_read_and_one_id_may_have_several() {
        let plants = parse(
            "[\"R-055\"]\ncfg = 'iop_break=\"fence\"'\ntests = [\"a\", \"b\"]\n\n\
             [[\"R-349\"]]\nreplace = { file = \"f.rs\", from = \"x\", to = '''y\nz''' }\ntests = [\"c\"]\n\
             [[\"R-349\"]]\ncfg = 'iop_break=\"q\"'\ntests = [\"d\"]\n",
        )
        .unwrap();
        assert_eq!(plants.len(), 3);
        assert_eq!(
            plants[0].change,
            Change::Cfg("iop_break=\"fence\"".to_owned())
        );
        assert_eq!(plants[0].tests, ["a", "b"]);
        assert_eq!([plants[0].line, plants[1].line], [1, 5]);
        let Change::Replace { file, to, .. } = &plants[1].change else {
            panic!("{plants:?}")
        };
        assert_eq!((file.as_str(), to.as_str()), ("f.rs", "y\nz"));
        assert_eq!(plants[2].id, "R-349");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, why) in [
            ("\n[\"R-055\"]\ntests = [\"a\"]\n", "exactly one of"),
            ("\n[\"R-055\"]\ncfg = \"a\"\n", "names no test"),
            (
                "\n[\"R-055\"]\ncfg = \"a'b\"\ntests = [\"a\"]\n",
                "single quote",
            ),
            (
                "\n[\"R-055\"]\ncfgs = \"a\"\ntests = [\"a\"]\n",
                "`cfgs` is not known",
            ),
            (
                "\n[\"R-055\"]\nreplace = { file = \"a\" }\ntests = [\"a\"]\n",
                "`from` is missing",
            ),
            ("\n[\"R-055\" = \n", ""),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(
                error.contains("mutations.toml:2: ") && error.contains(why),
                "{error}"
            );
        }
    }

    #[test]
    fn the_projects_own_file_is_well_formed() {
        read(&tree::root()).unwrap();
    }

    /// Code that moves takes its plants along.
    #[test]
    fn every_replaced_text_stands_exactly_once_in_its_file() {
        let root = tree::root();
        let stray: Vec<String> = read(&root)
            .unwrap()
            .into_iter()
            .filter_map(|plant| match plant.change {
                Change::Replace { file, from, .. } => {
                    let found = tree::read(&root, &file).unwrap().matches(&from).count();
                    (found != 1).then(|| format!("{}: {file} has it {found} times", plant.id))
                }
                Change::Cfg(_) => None,
            })
            .collect();
        assert!(stray.is_empty(), "{stray:#?}");
    }
}
