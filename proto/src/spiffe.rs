//! Text that the names of a workload identity are made of. `[A-41]`
use crate::limits::NAME_BYTES_MAX;

/// Longest trust domain, bytes (SPIFFE-ID §2.1).
pub const TRUST_DOMAIN_BYTES_MAX: u32 = 255;

/// 1 to `TRUST_DOMAIN_BYTES_MAX` lower-case letters, digits, `.`, `-`, `_`; no port, no user
/// (SPIFFE-ID §2.1).
#[must_use]
pub fn is_trust_domain(text: &str) -> bool {
    (1..=TRUST_DOMAIN_BYTES_MAX as usize).contains(&text.len())
        && text
            .bytes()
            .all(|c| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_'))
}

/// A path segment: letters, digits, `.`, `-`, `_`, at least one, and no relative segment
/// (SPIFFE-ID §2.2).
#[must_use]
pub fn is_segment(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'-' | b'_');
    !matches!(text, "" | "." | "..") && text.bytes().all(allowed)
}

/// A segment that we give as a name: of at most `NAME_BYTES_MAX` bytes.
#[must_use]
pub fn is_label(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX as usize && is_segment(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_and_a_domain_are_told_from_what_no_identity_can_hold() {
        let long = |bytes: u32| "a".repeat(bytes as usize);
        for name in ["a", "gpu-01", "N.1_x", "...", &long(NAME_BYTES_MAX)] {
            assert!(is_label(name), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "a b",
            "a/b",
            "gpu:1",
            "\u{e9}",
            &long(NAME_BYTES_MAX + 1),
        ] {
            assert!(!is_label(name), "{name}");
        }
        for domain in ["a", "iop.example", "x_1-y", &long(TRUST_DOMAIN_BYTES_MAX)] {
            assert!(is_trust_domain(domain), "{domain}");
        }
        for domain in [
            "",
            "IOP.example",
            "a:1",
            "a/b",
            &long(TRUST_DOMAIN_BYTES_MAX + 1),
        ] {
            assert!(!is_trust_domain(domain), "{domain}");
        }
    }
}
