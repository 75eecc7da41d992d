//! Width of comments.

use std::str::FromStr as _;

use anyhow::anyhow;
use proc_macro2::{TokenStream, TokenTree};

use super::{Finding, Rule};

/// Columns of a line that has a comment. Fenced diagrams and tables may be wider.
pub(super) const WIDTH: usize = 100;

/// Reports comments that are too wide.
pub(super) fn check(path: &str, text: &str, findings: &mut Vec<Finding>) -> anyhow::Result<()> {
    let mut literals = Vec::new();
    let tokens = TokenStream::from_str(text).map_err(|error| anyhow!("{path}: {error}"))?;
    literal_lines(tokens, &mut literals);
    let mut is_fenced = false;
    for (number, line) in (1..).zip(text.lines()) {
        let columns = line.chars().count();
        let comment = line.trim_start().trim_start_matches(['/', '!']).trim_start();
        if !line.trim_start().starts_with("//") {
            is_fenced = false;
        } else if comment.starts_with("```") {
            is_fenced = !is_fenced;
        }
        let is_literal = literals.iter().any(|(first, last)| (*first..=*last).contains(&number));
        // A link cannot be wrapped.
        if columns <= WIDTH
            || is_literal
            || is_fenced
            || comment.starts_with('|')
            || !line.contains("//")
            || line.contains("://")
        {
            continue;
        }
        findings.push(Finding {
            rule: Rule::CommentWidth,
            path: path.to_owned(),
            line: number,
            message: format!("{columns} columns; wrap the comment at {WIDTH}"),
        });
    }
    Ok(())
}

/// Collects the lines that string literals of several lines cover.
fn literal_lines(tokens: TokenStream, lines: &mut Vec<(usize, usize)>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => literal_lines(group.stream(), lines),
            TokenTree::Literal(literal) => {
                let span = literal.span();
                // Doc comments are literals as well, of the comment's own line.
                if span.start().line < span.end().line {
                    lines.push((span.start().line, span.end().line));
                }
            }
            TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(text: &str) -> Vec<usize> {
        let mut findings = Vec::new();
        check("a.rs", text, &mut findings).unwrap();
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn wide_comments_are_reported_and_literals_are_not() {
        let wide = "word ".repeat(30);
        let text = format!("/// {wide}\nfn f() {{\n    // {wide}\n    g(\"\n// {wide}\n\");\n}}\n");
        assert_eq!(lines_of(&text), [1, 3]);
        let diagram = format!("//! ```text\n//! {wide}\n//! ```\n//! {wide}\n");
        assert_eq!(lines_of(&diagram), [4]);
    }
}
