//! What stops a command before it has a result. A failed check is no error: it is counted.
//!
//! Lives on: one thread. Bound: none needed.
use std::fmt;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) enum Error {
    /// The command line.
    Usage(String),
    /// A file could not be read or written.
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A program could not be started or waited for.
    Process {
        program: String,
        source: std::io::Error,
    },
    /// A file does not say what it must; `line` counts from 1, 0 = the whole file.
    Content {
        path: PathBuf,
        line: usize,
        why: String,
    },
    /// A step outside ourselves did not do its part.
    Step(String),
}

impl Error {
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }

    pub(crate) fn content(path: &Path, line: usize, why: impl Into<String>) -> Self {
        Self::Content {
            path: path.to_owned(),
            line,
            why: why.into(),
        }
    }

    pub(crate) fn unknown(word: &str) -> Self {
        Self::Usage(format!(
            "unknown argument `{word}`; `cargo xtask` lists the commands"
        ))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) => f.write_str(text),
            Self::File { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Process { program, source } => write!(f, "{program}: {source}"),
            Self::Content { path, line: 0, why } => write!(f, "{}: {why}", path.display()),
            Self::Content { path, line, why } => write!(f, "{}:{line}: {why}", path.display()),
            Self::Step(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File { source, .. } | Self::Process { source, .. } => Some(source),
            Self::Usage(_) | Self::Content { .. } | Self::Step(_) => None,
        }
    }
}
