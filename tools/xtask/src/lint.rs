//! `lint`: the walls between files and crates, as a scan of the text.
//!
//! Lives on: one thread. Bound: the tree.
//!
//! A finding names file, line and the word that may not stand there. Comments, literals and test code
//! do not count. Every file a wall names must exist and hold code: a wall around nothing holds nothing.
//!
//! A line of a hot file that runs at start or at an end may name what hot code may not; it says so in
//! a comment `cold: <why>` beside it or directly above.
use std::path::Path;

use crate::error::Error;
use crate::report::Tally;
use crate::{rust_text, tree};

/// Words that may not stand in some files.
#[derive(Debug)]
pub(crate) struct Wall {
    pub name: &'static str,
    /// Files and folders (ending in `/`) it stands around; each must exist and hold code.
    pub inside: &'static [&'static str],
    /// Doors: files and folders of `inside` where the words may stand.
    pub except: &'static [&'static str],
    pub words: &'static [&'static str],
    pub why: &'static str,
}

const EDGE: [&str; 3] = ["proto/src/", "control/src/", "dataplane/src/"];
const ALL: [&str; 10] = [
    "proto/src/",
    "proto/lease/src/",
    "control/src/",
    "dataplane/src/",
    "dataplane/ring/src/",
    "tools/agent/src/",
    "tools/chaos/src/",
    "tools/iop/src/",
    "tools/xtask/src/",
    "bench/src/",
];

/// `[R-349]`: named on its own, so that a test can hold it.
pub(crate) const TRANSPORT: Wall = Wall {
    name: "transport builds no answer",
    inside: &[
        "dataplane/src/shard/session.rs",
        "dataplane/src/shard/inbound.rs",
        "dataplane/src/shard/envelopes.rs",
        "dataplane/src/shard/forward.rs",
        "dataplane/src/shard/writer.rs",
        "dataplane/src/tls/",
    ],
    except: &[],
    words: &[
        "http1",
        "surface",
        "console",
        "a2a",
        "admin",
        "httparse",
        "serde_json",
    ],
    why: "session, forwarding and TLS hand body slices to the client; it owns HTTP",
};

/// `[R-350]`: named on its own, so that a test can hold it.
pub(crate) const SURFACES: Wall = Wall {
    name: "surfaces are the input layers' alone",
    inside: &["proto/src/", "control/src/", "dataplane/src/"],
    except: &[
        "dataplane/src/lib.rs",
        "dataplane/src/surface/",
        "dataplane/src/epoch.rs", // holds the list of models as it is shown
        "dataplane/src/shard/mod.rs",
        "dataplane/src/shard/http1/head.rs",
        "dataplane/src/shard/client.rs",
        "dataplane/src/shard/request.rs",
        "dataplane/src/shard/answer.rs",
        "dataplane/src/shard/run_answer.rs",
    ],
    words: &["surface::", "Surface", "a2a", "console"],
    why: "what a surface's client reads is made where its request came in",
};

const WALLS: [Wall; 16] = [
    TRANSPORT,
    SURFACES,
    Wall {
        name: "glommio",
        inside: &ALL,
        except: &["dataplane/src/front/"],
        words: &["glommio"],
        why: "no glommio type crosses a module boundary",
    },
    Wall {
        name: "rustls",
        inside: &["dataplane/src/"],
        except: &["dataplane/src/tls/"],
        words: &["rustls"],
        why: "one folder changes when the TLS library does",
    },
    Wall {
        name: "generated types",
        inside: &ALL,
        except: &["proto/src/map.rs", "proto/src/map/"],
        words: &["prost", "OUT_DIR", "include!"],
        why: "a real schema drops in behind one module",
    },
    Wall {
        name: "atomics",
        inside: &EDGE,
        except: &["dataplane/src/shard/uring.rs", "dataplane/src/alloc.rs"],
        words: &["Atomic*", "UnsafeCell", "sync::atomic"],
        why: "lock-free code stands in iop-ring, where the model checker sees it",
    },
    Wall {
        name: "unsafe",
        inside: &ALL,
        except: &[
            "dataplane/ring/src/",
            "dataplane/src/shard/uring.rs",
            "dataplane/src/shard/buffer.rs",
            "dataplane/src/shard/send.rs",
            "bench/src/os.rs",
            "bench/src/relay.rs",
            "dataplane/src/alloc.rs",
            "dataplane/src/front/handover.rs",
        ],
        words: &["unsafe"],
        why: "each place stays small enough to read whole",
    },
    Wall {
        name: "decisions are pure",
        inside: &["control/src/", "proto/src/"],
        except: &["control/src/edge/model_tests/search.rs"], // takes every core
        words: &[
            "std::net",
            "std::thread",
            "std::fs",
            "std::env",
            "std::process",
            "Instant",
            "SystemTime",
            "Mutex",
            "RwLock",
            "tokio",
            "libc",
            "println!",
            "eprintln!",
            "async",
            "tracing",
        ],
        why: "time, randomness and configuration are arguments; nothing waits",
    },
    Wall {
        name: "leases are pure",
        inside: &["proto/lease/src/"],
        except: &[],
        words: &[
            "std::net",
            "std::thread",
            "std::fs",
            "std::env",
            "Instant",
            "SystemTime",
            "SystemRandom",
            "Mutex",
            "tokio",
            "tracing",
        ],
        why: "time and randomness are arguments; keys come as text, leases as bytes",
    },
    Wall {
        name: "event bus",
        inside: &["control/src/"],
        except: &[],
        words: &["subscribe*", "Subscriber", "broadcast"],
        why: "correctness never hangs on a fan-out [R-056]",
    },
    Wall {
        name: "one door for the model checker",
        inside: &["dataplane/ring/src/"],
        except: &["dataplane/ring/src/lib.rs"],
        words: &["core::sync", "std::sync", "loom::", "crossbeam_utils"],
        why: "only `crate::sync` names atomics, cells and `Arc`",
    },
    Wall {
        name: "ring depends on nothing",
        inside: &["dataplane/ring/Cargo.toml"],
        except: &[],
        words: &["iop-proto", "iop-control", "libc", "tokio", "parking_lot"],
        why: "the model checker must see all of it",
    },
    Wall {
        name: "proto depends on no crate of ours",
        inside: &["proto/Cargo.toml"],
        except: &[],
        words: &[
            "iop-control",
            "iop-ring",
            "iop-dataplane",
            "iop-agent",
            "tokio",
            "libc",
        ],
        why: "the words stand below everything",
    },
    Wall {
        name: "control depends on proto alone",
        inside: &["control/Cargo.toml"],
        except: &[],
        words: &[
            "iop-ring",
            "iop-dataplane",
            "iop-agent",
            "tokio",
            "libc",
            "rand",
            "tracing",
        ],
        why: "the simulator runs it without a machine around it",
    },
    Wall {
        name: "the agent does not know the Edge",
        inside: &["tools/agent/Cargo.toml"],
        except: &[],
        words: &["iop-dataplane", "iop-ring"],
        why: "the Edge must not be able to tell our agent from any other",
    },
    Wall {
        name: "bare loom cfg",
        inside: &["dataplane/ring/src/", "loom-tests/"],
        except: &[],
        words: &["cfg(loom", "not(loom"],
        why: "other crates react to it; ours is iop_loom",
    },
];

/// Begins the first line of a hot file.
const HOT: &str = "//! HOT.";
/// What hot code may not name.
const HEAT: [&str; 24] = [
    "Box",
    "Vec::new",
    "Vec::with_capacity",
    "vec!",
    "String",
    "to_vec",
    "to_owned",
    "to_string",
    "format!",
    "HashMap",
    "BTreeMap",
    "Rc",
    "Mutex",
    "RwLock",
    "Condvar",
    "Instant",
    "SystemTime",
    "dyn",
    "async",
    "tracing",
    "bytes::",
    "crossbeam_channel",
    "println!",
    "eprintln!",
];
/// Files that run once per frame; each must exist, hold code and say that it is hot.
const HOT_FILES: [&str; 21] = [
    "proto/src/framing.rs",
    "proto/src/view.rs",
    "proto/src/view/builder.rs",
    "proto/src/view/cut.rs",
    "proto/src/view/key.rs",
    "proto/src/view/reader.rs",
    "dataplane/src/shard/inbound.rs",
    "dataplane/src/shard/envelopes.rs",
    "dataplane/src/shard/turn.rs",
    "dataplane/src/shard/uring.rs",
    "dataplane/src/shard/buffer.rs",
    "dataplane/src/shard/send.rs",
    "dataplane/src/shard/outbox.rs",
    "dataplane/src/shard/forward.rs",
    "dataplane/src/shard/run_answer.rs",
    "dataplane/src/shard/window.rs",
    "dataplane/src/surface/json.rs",
    "dataplane/src/surface/openai/run.rs",
    "dataplane/src/surface/openai/tools.rs",
    "dataplane/src/text.rs",
    "dataplane/src/tls/record.rs",
];

pub(crate) fn run(root: &Path) -> Result<Tally, Error> {
    let files = tree::files(root)?;
    let mut tally = Tally::default();
    let mut show = |name: &str, findings: Vec<String>| {
        for finding in &findings {
            println!("lint: {finding}");
        }
        println!(
            "lint: {name}: {}",
            if findings.is_empty() {
                "holds"
            } else {
                "BROKEN"
            }
        );
        tally.add(Tally::of(findings.is_empty()));
    };
    for wall in &WALLS {
        show(wall.name, around(root, &files, wall)?);
    }
    show("hot files", heat(root, &files)?);
    show("first lines", first_lines(root, &files)?);
    show("no test is set aside", set_aside(root, &files)?);
    Ok(tally)
}

/// What stands inside a wall and may not, and what the wall names and is not there.
pub(crate) fn around(root: &Path, files: &[String], wall: &Wall) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    for place in wall.inside.iter().chain(wall.except) {
        let there = files.iter().filter(|file| covers(place, file));
        let mut holds_code = false;
        for file in there {
            holds_code = holds_code || !code_of(root, file)?.trim().is_empty();
        }
        if !holds_code {
            findings.push(format!(
                "{place}: holds no code, and `{}` is a wall around it",
                wall.name
            ));
        }
    }
    for file in files {
        let within = wall.inside.iter().any(|place| covers(place, file));
        if !within || wall.except.iter().any(|place| covers(place, file)) || is_test(file) {
            continue;
        }
        let code = code_of(root, file)?;
        for word in wall.words {
            for at in rust_text::word_offsets(&code, word) {
                let line = rust_text::line_of(&code, at);
                findings.push(format!("{file}:{line}: `{word}`: {}", wall.why));
            }
        }
    }
    Ok(findings)
}

fn heat(root: &Path, files: &[String]) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    let mut cold = 0;
    for file in files.iter().filter(|file| file.ends_with(".rs")) {
        let text = tree::read(root, file)?;
        if !text.starts_with(HOT) {
            continue;
        }
        let lines: Vec<&str> = text.lines().collect();
        let code = code_of(root, file)?;
        for word in HEAT {
            for at in rust_text::word_offsets(&code, word) {
                let line = rust_text::line_of(&code, at);
                if is_cold(&lines, line) {
                    cold += 1;
                } else {
                    findings.push(format!("{file}:{line}: `{word}` in a hot file"));
                }
            }
        }
    }
    for file in HOT_FILES {
        let text = tree::read(root, file).unwrap_or_default();
        if !text.starts_with(HOT) || rust_text::code(&text).trim().is_empty() {
            findings.push(format!(
                "{file}: must exist, hold code and begin with `{HOT}`"
            ));
        }
    }
    println!("lint: hot files: {cold} words on lines marked cold");
    Ok(findings)
}

/// Whether a comment `cold: <why>` stands on the line, or on the one above.
fn is_cold(lines: &[&str], line: usize) -> bool {
    let marked = |text: &str| {
        let why = text
            .split_once("//")
            .and_then(|(_, comment)| comment.split_once("cold: "));
        why.is_some_and(|(_, why)| !why.trim().is_empty())
    };
    let above = line.checked_sub(2).map(|n| lines[n].trim_start());
    marked(lines[line - 1]) || above.is_some_and(|text| text.starts_with("//") && marked(text))
}

/// Every source file begins with what it owns; a module of tests is owned by the file above it.
fn first_lines(root: &Path, files: &[String]) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    let due = |file: &&String| file.ends_with(".rs") && !is_test(file);
    for file in files.iter().filter(due) {
        if !tree::read(root, file)?.starts_with("//! ") {
            findings.push(format!("{file}:1: begins with `//!` and what it owns"));
        }
    }
    Ok(findings)
}

/// A test that is ignored or expects any panic shows nothing.
fn set_aside(root: &Path, files: &[String]) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.ends_with(".rs")) {
        let code = rust_text::code(&tree::read(root, file)?);
        for word in ["#[ignore", "#[should_panic"] {
            for at in rust_text::word_offsets(&code, word) {
                findings.push(format!(
                    "{file}:{}: `{word}]`",
                    rust_text::line_of(&code, at)
                ));
            }
        }
    }
    Ok(findings)
}

fn covers(place: &str, file: &str) -> bool {
    if place.ends_with('/') {
        file.starts_with(place) && file.ends_with(".rs")
    } else {
        file == place
    }
}

/// Test code in a file of its own.
fn is_test(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    file.contains("/tests/") || name == "tests.rs" || name.ends_with("_tests.rs")
}

/// A file without what does not count; a manifest loses its comments.
fn code_of(root: &Path, file: &str) -> Result<String, Error> {
    let text = tree::read(root, file)?;
    if file.ends_with(".rs") {
        return Ok(rust_text::without_tests(&rust_text::code(&text)));
    }
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default());
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves.
    #[test]
    fn r349_session_forwarding_and_tls_name_no_http() {
        let root = tree::root();
        let files = tree::files(&root).unwrap();
        assert_eq!(around(&root, &files, &TRANSPORT).unwrap(), [""; 0]);
    }

    /// Proves.
    #[test]
    fn r350_nothing_but_the_input_layers_names_a_surface() {
        let root = tree::root();
        let files = tree::files(&root).unwrap();
        assert_eq!(around(&root, &files, &SURFACES).unwrap(), [""; 0]);
    }

    /// A tree of two files in the build output, removed at the end.
    struct Small(std::path::PathBuf);

    impl Small {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = tree::target(&tree::root()).join("lint-tests").join(name);
            for (file, text) in files {
                tree::write_changed(&root.join(file), text.as_bytes()).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const WALL: Wall = Wall {
        name: "w",
        inside: &["src/"],
        except: &["src/door.rs"],
        words: &["glommio"],
        why: "because",
    };

    #[test]
    fn a_finding_names_file_line_and_word() {
        let text = "//! glommio\nuse a; // glommio\n#[cfg(test)]\nmod t { use glommio; }\nuse glommio::B;\n";
        let small = Small::new(
            "finding",
            &[("src/a.rs", text), ("src/door.rs", "use glommio;")],
        );
        let files = tree::files(&small.0).unwrap();
        let findings = around(&small.0, &files, &WALL).unwrap();
        assert_eq!(findings, ["src/a.rs:5: `glommio`: because"]);
    }

    #[test]
    fn a_wall_around_nothing_is_broken() {
        for door in ["", "//! only words\n#[cfg(test)]\nmod tests {}\n"] {
            let small = Small::new("nothing", &[("src/a.rs", "use a;"), ("src/door.rs", door)]);
            let files = tree::files(&small.0).unwrap();
            let findings = around(&small.0, &files, &WALL).unwrap();
            assert_eq!(
                findings,
                ["src/door.rs: holds no code, and `w` is a wall around it"]
            );
        }
        let small = Small::new("nowhere", &[("other/a.rs", "use a;")]);
        let files = tree::files(&small.0).unwrap();
        assert_eq!(around(&small.0, &files, &WALL).unwrap().len(), 2);
    }

    #[test]
    fn hot_words_need_a_cold_line() {
        let lines: Vec<&str> =
            "a // cold: at start\n// cold: at start\nb\nc // cold: \nd\nlet cold = \"cold: x\";"
                .lines()
                .collect();
        let cold: Vec<bool> = (1..=lines.len())
            .map(|line| is_cold(&lines, line))
            .collect();
        assert_eq!(cold, [true, true, true, false, false, false]);
    }

    #[test]
    fn a_library_name_in_a_manifest_is_found_and_a_longer_one_is_not() {
        let found = |text: &str| rust_text::has_word(text, "rand");
        assert!(found("rand.workspace = true") && !found("brand = 1") && !found("rand_core = 1"));
    }
}
