//! Text that other users wrote, made safe to print on an administrator's terminal.
//!
//! Selectors, messages of events and errors of the API server can contain control sequences, which
//! a terminal would carry out (CVE-2021-25743 is the same of kubectl), and characters that change
//! the order of what is displayed. They are printed as escapes.

use std::borrow::Cow;

/// Returns `text` with escapes such as `\u{1b}` in place of control characters, but for the end of
/// a line, and of invisible characters that affect the direction of text.
#[must_use]
pub fn escape(text: &str) -> Cow<'_, str> {
    escape_with(text, |character| character.escape_unicode().to_string())
}

/// Like [`escape`], with the escapes of JSON: `\u001b`. `json` is a JSON document, in which such
/// characters occur only within strings.
#[must_use]
pub fn escape_json(json: &str) -> Cow<'_, str> {
    // All of them are below U+10000, where JSON needs one escape.
    escape_with(json, |character| format!("\\u{:04x}", u32::from(character)))
}

/// Returns text of another user as a part of one line: white space becomes single spaces, so that
/// it cannot look like a line of the program, and what exceeds `max` characters is cut.
#[must_use]
pub fn one_line(text: &str, max: usize) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = line.char_indices().nth(max) {
        line.truncate(end);
        line = format!("{}...", line.trim_end());
    }
    line
}

fn escape_with(text: &str, escaped: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match is_unsafe(character) {
            true => safe.push_str(&escaped(character)),
            false => safe.push(character),
        }
    }
    Cow::Owned(safe)
}

/// Returns true for control characters (C0, DEL and C1) except the end of a line, and for the
/// bidirectional and zero-width formatting characters of Unicode.
fn is_unsafe(character: char) -> bool {
    let is_format = matches!(
        character,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
    );
    is_format || (character.is_control() && character != '\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sequences_become_escapes() {
        assert_eq!(escape("a\u{1b}]0;title\u{7}b"), "a\\u{1b}]0;title\\u{7}b");
        assert_eq!(escape("\u{9b}31m\r\n\u{202e}"), "\\u{9b}31m\\u{d}\n\\u{202e}");
        assert!(matches!(escape("├─ 25% \u{2587}\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({"message": "\u{9b}31m\u{202e}\u{1b}\n"});
        let json = serde_json::to_string_pretty(&value).expect("JSON");
        let escaped = escape_json(&json);
        assert!(!escaped.chars().any(is_unsafe), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).expect("JSON"), value);
    }

    #[test]
    fn a_text_cannot_add_lines_or_fill_the_screen() {
        assert_eq!(one_line(" a\n\n  Pod x/y (Running)\tb ", 99), "a Pod x/y (Running) b");
        assert_eq!(one_line("four", 4), "four");
        assert_eq!(one_line("äöü ß", 3), "äöü...");
        assert_eq!(one_line(" \n", 3), "");
    }
}
