//! Rust source as text: what is code, what is a comment or a literal, what is test.
//!
//! Lives on: one thread. Bound: one file at a time.
//!
//! Every function keeps length and line breaks: a byte offset in the result is one in the file.

/// Blanks comments and the contents of string and character literals.
pub(crate) fn code(source: &str) -> String {
    let mut out: Vec<u8> = source.bytes().collect();
    let bytes = source.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' if !follows_word(bytes, at) => raw_string_end(bytes, at).unwrap_or(at),
            b'b' | b'c' if !follows_word(bytes, at) => raw_string_end(bytes, at + 1).unwrap_or(at),
            b'\'' => char_end(bytes, at),
            _ => at,
        };
        if end > at {
            blank(&mut out[at..end]);
            at = end;
        } else {
            at += 1;
        }
    }
    String::from_utf8(out).expect("whole characters were blanked")
}

/// Blanks every item under `#[cfg(test)]` and its like in text that [`code`] returned.
pub(crate) fn without_tests(code: &str) -> String {
    let mut out: Vec<u8> = code.bytes().collect();
    let bytes = code.as_bytes();
    let mut at = 0;
    while let Some(found) = find(bytes, b"#[cfg(", at) {
        let end = attribute_end(bytes, found);
        let condition = &code[found + 6..end];
        at = end;
        let is_test =
            has_word(condition, "test") && !condition.replace(' ', "").contains("not(test");
        if is_test {
            at = item_end(bytes, end);
            blank(&mut out[found..at]);
        }
    }
    String::from_utf8(out).expect("whole characters were blanked")
}

/// Whether `word` stands in `text` on its own. A word may be a path, end in `!` or `::`, or end in `*`
/// for any ending.
pub(crate) fn has_word(text: &str, word: &str) -> bool {
    !word_offsets(text, word).is_empty()
}

/// Byte offsets of every `word` in `text`, as [`has_word`] understands it.
pub(crate) fn word_offsets(text: &str, word: &str) -> Vec<usize> {
    let (stem, any_ending) = match word.strip_suffix('*') {
        Some(stem) => (stem, true),
        None => (word, false),
    };
    let starts_word = stem.bytes().next().is_some_and(is_word);
    let ends_word = stem.bytes().last().is_some_and(is_word) && !any_ending;
    let bytes = text.as_bytes();
    text.match_indices(stem)
        .map(|(at, _)| at)
        .filter(|&at| {
            let before = at.checked_sub(1).map(|n| bytes[n]);
            let after = bytes.get(at + stem.len()).copied();
            !(starts_word && before.is_some_and(is_word) || ends_word && after.is_some_and(is_word))
        })
        .collect()
}

/// Line of a byte offset, from 1.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset]
        .iter()
        .filter(|&&byte| byte == b'\n')
        .count()
        + 1
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn follows_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && is_word(bytes[at - 1])
}

fn blank(bytes: &mut [u8]) {
    for byte in bytes {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

fn find(bytes: &[u8], needle: &[u8], from: usize) -> Option<usize> {
    bytes[from..]
        .windows(needle.len())
        .position(|window| window == needle)
        .map(|n| from + n)
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    find(bytes, b"\n", at).unwrap_or(bytes.len())
}

fn block_comment_end(bytes: &[u8], at: usize) -> usize {
    let (mut depth, mut at) = (0usize, at);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if bytes[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// `at` stands on the `r` of a raw string; `None` when it is no such thing.
fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    if bytes.get(at) != Some(&b'r') {
        return None;
    }
    let hashes = bytes[at + 1..]
        .iter()
        .take_while(|&&byte| byte == b'#')
        .count();
    let open = at + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let mut close = vec![b'"'];
    close.resize(1 + hashes, b'#');
    Some(find(bytes, &close, open + 1).map_or(bytes.len(), |end| end + close.len()))
}

/// A character literal's end, or `at` for a lifetime.
fn char_end(bytes: &[u8], at: usize) -> usize {
    if bytes.get(at + 1) == Some(&b'\\') {
        let from = (at + 3).min(bytes.len()); // the escaped character may be a quote itself
        return find(bytes, b"'", from).map_or(bytes.len(), |end| end + 1);
    }
    // One character of one to four bytes, then a quote.
    let length = match bytes.get(at + 1) {
        Some(0x00..0x80) => 1,
        Some(0xc0..0xe0) => 2,
        Some(0xe0..0xf0) => 3,
        Some(_) => 4,
        None => return at,
    };
    if bytes.get(at + 1 + length) == Some(&b'\'') {
        at + 2 + length
    } else {
        at
    }
}

/// `at` stands on `#`; behind its closing bracket.
fn attribute_end(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0usize;
    for (n, &byte) in bytes.iter().enumerate().skip(at) {
        match byte {
            b'[' => depth += 1,
            b']' if depth == 1 => return n + 1,
            b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    bytes.len()
}

/// Behind the item that begins at `at`: its closing brace, or its semicolon outside any bracket.
fn item_end(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0usize;
    let mut n = at;
    while n < bytes.len() {
        match bytes[n] {
            b'#' if depth == 0 && bytes.get(n + 1) == Some(&b'[') => {
                n = attribute_end(bytes, n);
                continue;
            }
            b'{' | b'(' | b'[' => depth += 1,
            b'}' if depth <= 1 => return n + 1,
            b'}' | b')' | b']' => depth = depth.saturating_sub(1),
            b';' | b',' if depth == 0 => return n + 1,
            _ => {}
        }
        n += 1;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_nothing_else() {
        let source = r##"let a = "Box // \" x"; // Box
/* Box /* Box */ Box */ let b: &'a str = r#"Box " Box"#; let c = '"'; let d = '\''; let e = b"Box";
let f = 'ü'; let g: Box<u8> = br"Box"; let h = "\u{42}"; fn r<'r>() {}
"##;
        let masked = code(source);
        assert_eq!(masked.len(), source.len());
        assert_eq!(masked.matches("Box").count(), 1);
        assert!(masked.contains("let g: Box<u8> = "), "{masked}");
        assert!(
            masked.contains("fn r<'r>() {}") && masked.contains("let b: &'a str ="),
            "{masked}"
        );
        assert_eq!(masked.lines().count(), source.lines().count());
    }

    #[test]
    fn test_items_are_blanked_with_their_braces_and_others_stay() {
        let source = "use a;\n#[cfg(test)]\nuse b;\n#[cfg(not(test))]\nfn keep() {}\n\
                      #[cfg(all(test, x))]\n#[rustfmt::skip]\nmod tests {\n fn inner() { {} }\n}\nfn c() {}\n";
        let rest = without_tests(&code(source));
        assert!(rest.contains("use a;") && rest.contains("keep") && rest.contains("fn c()"));
        assert!(
            !rest.contains("use b;") && !rest.contains("inner"),
            "{rest}"
        );
    }

    #[test]
    fn a_word_stands_alone() {
        let found = |text: &str, word: &str| has_word(text, word);
        assert!(found("x: Box<u8>", "Box") && !found("Boxed", "Box") && !found("MyBox", "Box"));
        assert!(found("a = Vec::new()", "Vec::new") && !found("Vec::new_in(a)", "Vec::new"));
        assert!(found("format!(x)", "format!") && !found("my_format!(x)", "format!"));
        assert!(found("AtomicU64::new", "Atomic*") && !found("MyAtomicU64", "Atomic*"));
        assert!(found("use bytes::Bytes", "bytes::") && !found("let bytes = 1", "bytes::"));
        assert_eq!(word_offsets("a b a", "a"), [0, 4]);
        assert_eq!([line_of("a\nb\nc", 0), line_of("a\nb\nc", 4)], [1, 3]);
    }
}
