//! Width of Markdown.

use super::{Finding, Rule};

/// Columns of a line of Markdown. Tables, code, headings and links may be wider.
pub(super) const WIDTH: usize = 100;

/// Reports lines of prose that are too wide.
pub(super) fn check(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut is_code = false;
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        if start.starts_with("```") || start.starts_with("~~~") {
            is_code = !is_code;
            continue;
        }
        let columns = line.chars().count();
        let is_indented_code = line.starts_with("    ") && !start.starts_with(['-', '*']);
        if is_code
            || is_indented_code
            || columns <= WIDTH
            || start.starts_with(['|', '#', '<', '!'])
        {
            continue;
        }
        // A word that is too long by itself cannot be wrapped.
        let longest = line.split_whitespace().map(|word| word.chars().count()).max();
        if longest.is_some_and(|longest| longest > WIDTH - 20) || is_link_reference(start) {
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

fn is_link_reference(line: &str) -> bool {
    line.starts_with('[') && line.contains("]: ")
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
        assert_eq!(lines_of(&text), [1, 6]);
    }
}
