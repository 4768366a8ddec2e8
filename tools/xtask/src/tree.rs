//! The project's files as they lie on disk, committed or not.
//!
//! Lives on: one thread. Bound: the tree, without build output.
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Directories that hold nothing of ours.
const SKIPPED: [&str; 5] = ["target", ".git", "node_modules", "__pycache__", ".venv"];

/// The workspace root: two above this package.
pub(crate) fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let above = package
        .ancestors()
        .nth(2)
        .expect("the package lies two below the root");
    above.to_owned()
}

/// Cargo's target directory: the environment's, else `target` in the root.
pub(crate) fn target(root: &Path) -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(path) => root.join(path),
        None => root.join("target"),
    }
}

/// Every file below `root`, relative, with `/`, sorted.
pub(crate) fn files(root: &Path) -> Result<Vec<String>, Error> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(Error::file(&folder))? {
            let entry = entry.map_err(Error::file(&folder))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(Error::file(&path))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if kind.is_dir() {
                if !SKIPPED.contains(&name.as_ref()) && !name.starts_with("target-") {
                    folders.push(path);
                }
            } else if kind.is_file() {
                let inside = path.strip_prefix(root).expect("a path below the root");
                found.push(inside.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    found.sort();
    Ok(found)
}

pub(crate) fn read(root: &Path, file: &str) -> Result<String, Error> {
    let path = root.join(file);
    std::fs::read_to_string(&path).map_err(Error::file(&path))
}

/// Writes only what differs, so that a build sees no change where there is none.
pub(crate) fn write_changed(path: &Path, content: &[u8]) -> Result<(), Error> {
    if std::fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(Error::file(folder))?;
    }
    std::fs::write(path, content).map_err(Error::file(path))
}
