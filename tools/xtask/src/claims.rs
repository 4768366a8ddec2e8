//! Which test claims to prove which requirement, read from comments; and which ids there are.
//!
//! Lives on: one thread. Bound: the tree.
//!
//! A claim is `Proves, [S-06]` in the comment block directly above a Rust or Python test.
//! Anywhere else it counts nothing, and is reported.
use std::collections::BTreeMap;
use std::path::Path;

use crate::error::Error;
use crate::{rust_text, tree};

/// Ids of the contract and where they stand, in the documents' order.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    /// Category and its ids.
    pub groups: Vec<(String, Vec<String>)>,
}

impl Ids {
    pub(crate) fn read(root: &Path) -> Result<Self, Error> {
        let mut ids = Self::default();
        for line in tree::read(root, "docs/contract/ledger.md")?.lines() {
            if let Some(title) = line
                .strip_prefix("## ")
                .and_then(|rest| rest.rsplit_once(" ("))
            {
                ids.groups.push((title.0.to_owned(), Vec::new()));
            } else if let Some(id) = line.strip_prefix("### ").and_then(leading_id)
                && let Some((_, members)) = ids.groups.last_mut()
            {
                members.push(id);
            }
        }
        ids.groups.retain(|(_, members)| !members.is_empty());
        for (file, before, group) in [
            ("docs/contract/states.md", "| ", "races"),
            ("docs/contract/cases.md", "**", "cases"),
            ("docs/contract/decisions.md", "- **", "decisions"),
        ] {
            let text = tree::read(root, file)?;
            let members = text
                .lines()
                .filter_map(|line| leading_id(line.strip_prefix(before)?));
            ids.groups.push((group.to_owned(), members.collect()));
        }
        Ok(ids)
    }

    pub(crate) fn contains(&self, id: &str) -> bool {
        self.groups
            .iter()
            .any(|(_, members)| members.iter().any(|member| member == id))
    }
}

/// One test and what it claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub file: String,
    /// Of the test attribute or `def`, from 1.
    pub line: usize,
    pub name: String,
    pub ids: Vec<String>,
}

/// Every test of the tree, and every line with a claim that belongs to no test.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub tests: Vec<Test>,
    pub stray: Vec<(String, usize)>,
}

impl Claims {
    pub(crate) fn read(root: &Path) -> Result<Self, Error> {
        let mut claims = Self::default();
        for file in tree::files(root)? {
            if file.ends_with(".rs") {
                claims.file(&file, &tree::read(root, &file)?, &RUST);
            } else if file.ends_with(".py") {
                claims.file(&file, &tree::read(root, &file)?, &PYTHON);
            }
        }
        Ok(claims)
    }

    /// Tests by id.
    pub(crate) fn by_id(&self) -> BTreeMap<&str, Vec<&Test>> {
        let mut found: BTreeMap<&str, Vec<&Test>> = BTreeMap::new();
        for test in &self.tests {
            for id in &test.ids {
                found.entry(id).or_default().push(test);
            }
        }
        found
    }

    fn file(&mut self, file: &str, text: &str, language: &Language) {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let code = (language.code)(text);
        let code: Vec<&str> = code.lines().map(str::trim).collect();
        let mut counted = Vec::new();
        for at in 0..lines.len() {
            if !(language.is_test)(code[at]) {
                continue;
            }
            let Some(name) = (at..lines.len()).find_map(|n| (language.name)(code[n])) else {
                continue;
            };
            let block = above(&lines, at, language);
            let comment: Vec<&str> = block
                .iter()
                .filter_map(|&n| (language.comment)(lines[n]))
                .collect();
            counted.extend(block);
            self.tests.push(Test {
                file: file.to_owned(),
                line: at + 1,
                name: name.to_owned(),
                ids: proved(&comment.join(" ")),
            });
        }
        for (at, line) in lines.iter().enumerate() {
            let claims = (language.comment)(line).is_some_and(|text| !proved(text).is_empty());
            if claims && !counted.contains(&at) {
                self.stray.push((file.to_owned(), at + 1));
            }
        }
    }
}

struct Language {
    /// The text without comments and literals, line for line.
    code: fn(&str) -> String,
    /// A comment's text; `None` for any other line.
    comment: fn(&str) -> Option<&str>,
    /// What may stand between a comment and its test.
    between: fn(&str) -> bool,
    is_test: fn(&str) -> bool,
    /// The name a line defines.
    name: fn(&str) -> Option<&str>,
}

const RUST: Language = Language {
    code: rust_text::code,
    comment: |line| {
        let text = line.strip_prefix("//")?;
        (!text.starts_with('!')).then(|| text.trim_start_matches('/').trim_start())
    },
    between: |line| line.starts_with("#[") && line.ends_with(']'),
    is_test: |line| {
        line.strip_prefix("#[").is_some_and(|attribute| {
            let path = attribute.split(['(', ']', ' ']).next().unwrap_or_default();
            ["test", "rstest", "test_case"].contains(&path.rsplit("::").next().unwrap_or(path))
        })
    },
    name: |line| defined(line, "fn "),
};

const PYTHON: Language = Language {
    code: str::to_owned,
    comment: |line| {
        line.strip_prefix('#')
            .map(|text| text.trim_start_matches(['#', ' ']))
    },
    between: |line| line.starts_with('@'),
    is_test: |line| defined(line, "def ").is_some_and(|name| name.starts_with("test")),
    name: |line| defined(line, "def "),
};

/// The word behind `keyword`, if the line begins a definition with it.
fn defined<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    let at = line.find(keyword)?;
    let modifiers = &line[..at];
    if !modifiers.is_empty() && !modifiers.ends_with(' ') || modifiers.contains(['/', '"', '=']) {
        return None;
    }
    let rest = &line[at + keyword.len()..];
    let end = rest
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// Lines of the comment block that ends directly above line `at`, top first.
fn above(lines: &[&str], at: usize, language: &Language) -> Vec<usize> {
    let mut block: Vec<usize> = (0..at)
        .rev()
        .take_while(|&n| (language.comment)(lines[n]).is_some() || (language.between)(lines[n]))
        .collect();
    block.reverse();
    block
}

/// The ids that follow `Proves` with nothing but commas and `and` between.
fn proved(text: &str) -> Vec<String> {
    let mut ids = Vec::new();
    for (at, _) in text.match_indices("Proves") {
        let mut rest = text[at + "Proves".len()..].trim_start_matches([':', ' ']);
        while let Some(id) = rest.strip_prefix('[').and_then(leading_id) {
            let Some(behind) = rest[1 + id.len()..].strip_prefix(']') else {
                break;
            };
            rest = behind.trim_start_matches([',', ' ']);
            rest = rest.strip_prefix("and ").unwrap_or(rest).trim_start();
            ids.push(id);
        }
    }
    ids
}

/// `R-073` at the start of `text`: a kind, a dash, two or three digits.
fn leading_id(text: &str) -> Option<String> {
    let (kind, rest) = text.split_once('-')?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let good = ["R", "S", "P", "D"].contains(&kind) && (2..=3).contains(&digits);
    good.then(|| format!("{kind}-{}", &rest[..digits]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rust(text: &str) -> Claims {
        let mut claims = Claims::default();
        claims.file("a.rs", text, &RUST);
        claims
    }

    #[test]
    fn a_claim_counts_directly_above_a_test_alone() {
        let found = rust(
            "/// Says why. Proves [R-055], [S-05] and\n/// [D-10].\n#[cfg(unix)]\n#[test]\n\
             #[cfg(unix)]\nfn r055_holds() {\n}\n",
        );
        let ids: Vec<&str> = found.tests[0].ids.iter().map(String::as_str).collect();
        assert_eq!(
            (found.tests[0].name.as_str(), found.tests[0].line),
            ("r055_holds", 4)
        );
        assert_eq!(ids, ["R-055", "S-05", "D-10"]);
        assert!(found.stray.is_empty());
        for stray in [
            "/// Proves [R-055].\n\n#[test]\nfn a() {}\n",
            "/// Proves [R-055].\nfn helper() {}\n",
            "#[test]\nfn a() {\n    // Proves [R-055].\n}\n",
        ] {
            let found = rust(stray);
            assert!(
                found.tests.iter().all(|test| test.ids.is_empty()),
                "{stray}"
            );
            assert_eq!(found.stray.len(), 1, "{stray}");
        }
    }

    #[test]
    fn other_test_attributes_count_and_lookalikes_do_not() {
        let found = rust(
            "// Proves [P-01].\n#[tokio::test(flavor = \"current_thread\")]\nasync fn a() {}\n\
             #[cfg(test)]\nmod tests {}\nconst A: &str = \"\n#[test]\nfn no() {}\n\";\n",
        );
        assert_eq!(found.tests.len(), 1);
        assert_eq!(found.tests[0].ids, ["P-01"]);
    }

    #[test]
    fn python_tests_claim_with_hash_comments() {
        let mut claims = Claims::default();
        let text =
            "# Proves [R-089].\n@slow\nasync def test_stream():\n    pass\ndef helper(): pass\n";
        claims.file("a.py", text, &PYTHON);
        assert_eq!(claims.tests.len(), 1);
        assert_eq!(claims.tests[0].ids, ["R-089"]);
    }

    #[test]
    fn words_between_end_the_list_of_ids() {
        assert_eq!(proved("Proves [R-001], but not [R-002]."), ["R-001"]);
        assert!(proved("Proves much. [R-002]").is_empty());
        assert!(proved("Proves [X-002], [R-1], [R-0001]").is_empty());
    }

    #[test]
    fn the_contract_names_its_ids() {
        let ids = Ids::read(&tree::root()).unwrap();
        for id in ["R-001", "R-356", "S-01", "P-01", "D-01"] {
            assert!(ids.contains(id), "{id}");
        }
        assert!(!ids.contains("R-999"));
        let count = |kind: &str| {
            let all = ids.groups.iter().flat_map(|(_, members)| members);
            all.filter(|id| id.starts_with(kind)).count()
        };
        assert_eq!(count("R-"), 356);
    }
}
