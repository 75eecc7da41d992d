//! The syntaxes that names obey, as predicates on text.

/// RFC 1123 label: lowercase letters, digits and `-`, a letter or digit at both ends, at most 63
/// bytes.
pub(super) fn is_dns_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return false };
    bytes.len() <= 63
        && is_lower_alphanumeric(*first)
        && is_lower_alphanumeric(*last)
        && bytes.iter().all(|b| is_lower_alphanumeric(*b) || *b == b'-')
}

/// RFC 1123 subdomain as Kubernetes checks it: dot-separated parts that look like labels; a part
/// has no limit of its own.
pub(super) fn is_dns_subdomain(text: &str) -> bool {
    !text.is_empty()
        && text.split('.').all(|part| {
            let bytes = part.as_bytes();
            let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return false };
            is_lower_alphanumeric(*first)
                && is_lower_alphanumeric(*last)
                && bytes.iter().all(|b| is_lower_alphanumeric(*b) || *b == b'-')
        })
}

/// The hyphenated form of a UUID, 8-4-4-4-12 hexadecimal digits of either case.
pub(super) fn is_extended_resource(text: &str) -> bool {
    text.split_once('/').is_some_and(|(domain, name)| {
        let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = name.as_bytes();
        is_dns_subdomain(domain)
            && bytes.len() <= 63
            && is_end(bytes.first())
            && is_end(bytes.last())
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
    })
}

pub(super) fn is_uuid(text: &str) -> bool {
    let mut parts = text.split('-');
    let shaped = [8, 4, 4, 4, 12].iter().all(|length| {
        parts.next().is_some_and(|part| {
            part.len() == *length && part.bytes().all(|b| b.is_ascii_hexdigit())
        })
    });
    shaped && parts.next().is_none()
}

/// A UUID in lowercase, the only form that the API server accepts for share ids.
pub(super) fn is_lowercase_uuid(text: &str) -> bool {
    is_uuid(text) && !text.bytes().any(|b| b.is_ascii_uppercase())
}

fn is_lower_alphanumeric(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}
