//! What stops a run before it has a verdict. A broken promise is no error: it is counted.
//!
//! Lives on: any thread. Bound: none needed.
use std::fmt;
use std::io;

/// Names what was done and what came of it.
#[derive(Debug)]
pub(crate) enum Error {
    /// The operating system refused.
    Io { what: String, source: io::Error },
    /// A program of the stage did not do its part.
    Part(String),
    /// The command line.
    Usage(String),
}

impl Error {
    /// For `map_err`: the operating system refused `what`.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { what, source } => write!(f, "{what}: {source}"),
            Self::Part(why) | Self::Usage(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Part(_) | Self::Usage(_) => None,
        }
    }
}
