//! A model server's own record of its calls: lines in a file that outlives it.
//!
//! Lives on: written by the server, read by the judge. View: one server, all its lives. Bound: what is
//! read since the last reading; a line is written by one call of the kernel, so a kill cuts none.
//!
//! ```text
//! L life ms                       the server has begun
//! B tag id path digest nth ms     a call has begun: digest of its body, nth request of its connection
//! O tag ms                        the head of the answer is about to be written
//! W tag digest bytes ms           the last byte of a whole answer is about to be written
//! E tag whole|left|broken ms      over: written, the caller left, or ended here on purpose
//! ```
//!
//! `ms`: when it was written, as the host's clock tells it.
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970: what processes of one host agree on.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
}

/// The writing end.
#[derive(Debug)]
pub(crate) struct Writer {
    file: File,
    /// Which life of the server this is, from 1.
    pub(crate) life: usize,
}

impl Writer {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let before = std::fs::read_to_string(path).unwrap_or_default();
        let life = before.lines().filter(|line| line.starts_with("L ")).count() + 1;
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let writer = Self { file, life };
        writer.line(&format!("L {life}"))?;
        Ok(writer)
    }

    pub(crate) fn line(&self, text: &str) -> io::Result<()> {
        (&self.file).write_all(format!("{text} {}\n", now_ms()).as_bytes())
    }
}

/// One call as its server recorded it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) tag: String,
    pub(crate) path: String,
    /// Of the request's body.
    pub(crate) asked: String,
    /// Which request of its connection it was, from 1.
    pub(crate) nth: u32,
    pub(crate) begun_ms: u64,
    /// With its server's next life, at the latest; `None`: it was seen to end by nobody.
    pub(crate) ended_ms: Option<u64>,
    /// A head was written.
    pub(crate) has_output: bool,
    pub(crate) output_ms: Option<u64>,
    /// Digest of the whole answer, written to its last byte.
    pub(crate) whole: Option<String>,
    /// The caller was seen to leave.
    pub(crate) was_left: bool,
}

impl Call {
    /// The server it was made of.
    pub(crate) fn server(&self) -> String {
        self.tag.split('.').next().unwrap_or_default().to_owned()
    }
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct Reader {
    path: PathBuf,
    offset: u64,
}

/// Calls by the id of their request.
pub(crate) type Calls = HashMap<u64, Vec<Call>>;

impl Reader {
    pub(crate) const fn new(path: PathBuf) -> Self {
        Self { path, offset: 0 }
    }

    /// Adds what was written since the last reading; no call may be open meanwhile.
    pub(crate) fn read(&mut self, calls: &mut Calls) -> io::Result<()> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        self.offset += text.len() as u64;
        parse(&text, calls);
        Ok(())
    }
}

fn parse(text: &str, calls: &mut Calls) {
    let mut found: Vec<(u64, Call)> = Vec::new();
    let mut rows: HashMap<String, usize> = HashMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match *words.as_slice() {
            ["L", _, ms] => {
                let open = found.iter_mut().filter(|(_, call)| call.ended_ms.is_none());
                open.for_each(|(_, call)| call.ended_ms = ms.parse().ok());
            }
            ["B", tag, id, path, asked, nth, ms] => {
                rows.insert(tag.to_owned(), found.len());
                let call = Call {
                    tag: tag.to_owned(),
                    path: path.to_owned(),
                    asked: asked.to_owned(),
                    nth: nth.parse().unwrap_or(0),
                    begun_ms: ms.parse().unwrap_or(0),
                    ..Call::default()
                };
                found.push((u64::from_str_radix(id, 16).unwrap_or(0), call));
            }
            [what, tag, ref rest @ ..] => {
                let Some((_, call)) = rows.get(tag).map(|&row| &mut found[row]) else {
                    continue;
                };
                match (what, rest) {
                    ("O", [ms]) => {
                        (call.has_output, call.output_ms) = (true, ms.parse().ok());
                    }
                    ("W", [digest, ..]) => call.whole = Some((*digest).to_owned()),
                    ("E", [how, ms]) => {
                        (call.was_left, call.ended_ms) = (*how == "left", ms.parse().ok());
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    for (id, call) in found {
        calls.entry(id).or_default().push(call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read_as_they_were_written() {
        let path = std::env::temp_dir().join(format!("iop-journal-{}", std::process::id()));
        let _gone = std::fs::remove_file(&path);
        let writer = Writer::open(&path).unwrap();
        assert_eq!(writer.life, 1);
        let mut reader = Reader::new(path.clone());
        for line in [
            "B p.1.1 2a /v1/x d 1",
            "O p.1.1",
            "B p.1.2 2a /v1/x d 2",
            "W p.1.1 e 9",
        ] {
            writer.line(line).unwrap();
        }
        let mut calls = Calls::new();
        reader.read(&mut calls).unwrap();
        let of = &calls[&0x2a];
        assert_eq!((of.len(), of[1].nth, of[1].has_output), (2, 2, false));
        assert_eq!(
            (of[0].has_output, of[0].whole.as_deref()),
            (true, Some("e"))
        );
        assert!(of[0].begun_ms > 0 && of[0].output_ms >= Some(of[0].begun_ms));
        assert_eq!(of[0].ended_ms, None);
        assert_eq!(Writer::open(&path).unwrap().life, 2);
        let mut later = Calls::new();
        reader.read(&mut later).unwrap();
        assert!(later.is_empty());
        let mut all = Calls::new();
        Reader::new(path.clone()).read(&mut all).unwrap();
        assert!(
            all[&0x2a].iter().all(|call| call.ended_ms.is_some()),
            "by the next life"
        );
        std::fs::remove_file(&path).unwrap();
    }
}
