//! Reading of manifests: comments are text to the reader, however many there are.

use serde::de::DeserializeOwned;
use serde_saphyr::{Error, Options};

/// Returns the value of the only document.
///
/// # Errors
/// The text is not YAML, or not of this type.
pub(crate) fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    serde_saphyr::from_str_with_options(text, options())
}

/// Returns the values of all documents; empty ones are left out.
///
/// # Errors
/// The text is not YAML, or a document is not of this type.
pub(crate) fn from_multiple<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, Error> {
    serde_saphyr::from_multiple_with_options(text, options())
}

/// The parser refuses 32 comments in a row, which it keeps for those who ask for them.
fn options() -> Options {
    serde_saphyr::options! { emit_comments: false }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_long_comment_is_no_error() {
        let comment = "# a line\n".repeat(1000);
        let text = format!("{comment}a:\n{comment}  b: 1\n{comment}---\n{comment}c: 2\n");
        let documents: Vec<Value> = from_multiple(&text).expect("two documents");
        assert_eq!(documents, [json!({"a": {"b": 1}}), json!({"c": 2})]);
        assert_eq!(from_str::<Value>(&format!("{comment}a: 1\n")).expect("one"), json!({"a": 1}));
    }
}
