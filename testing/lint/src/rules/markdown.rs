//! Width of Markdown.

use super::{Finding, Rule};

/// Columns of a line of Markdown. Tables and code may be wider, and lines that cannot be wrapped:
/// of one word, or with a link that is almost as wide by itself.
pub(super) const WIDTH: usize = 100;

/// Reports lines of prose that are too wide.
pub(super) fn check(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut is_code = false;
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        if start.starts_with("```") {
            is_code = !is_code;
            continue;
        }
        let columns = line.chars().count();
        if is_code || columns <= WIDTH || start.starts_with('|') || is_unbreakable(start) {
            continue;
        }
        findings.push(Finding {
            rule: Rule::MarkdownWidth,
            path: path.to_owned(),
            line: number,
            message: format!("{columns} columns; wrap at {WIDTH}"),
        });
    }
}

/// Returns true if no line break can make the line narrow enough.
fn is_unbreakable(line: &str) -> bool {
    let is_link_reference = line.starts_with('[') && line.contains("]: ");
    let longest = line.split_whitespace().map(|word| word.chars().count()).max();
    let has_wide_link = line.contains("](") && longest.is_some_and(|longest| longest > WIDTH - 20);
    !line.contains(' ') || is_link_reference || has_wide_link
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(text: &str) -> Vec<usize> {
        let mut findings = Vec::new();
        check("a.md", text, &mut findings);
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn wide_prose_is_reported_and_code_and_tables_are_not() {
        let wide = "word ".repeat(30);
        let text =
            format!("{wide}\n| {wide} |\n```\n{wide}\n```\n- {wide}\n# {wide}\n[a]: {wide}\n");
        assert_eq!(lines_of(&text), [1, 6, 7]);
    }

    #[test]
    fn only_lines_that_cannot_be_wrapped_are_wide() {
        let address = format!("https://example.com/{}", "a".repeat(100));
        let text =
            format!("{address}\nsee [it]({address})\nsee {address}\n    {address} indented\n");
        assert_eq!(lines_of(&text), [3, 4]);
    }
}
