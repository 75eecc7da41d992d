//! Comments that begin with `#`: scripts, YAML, TOML, the Makefile, Dockerfiles.

use super::comments::WIDTH;
use super::items::noun_clause;
use super::{Finding, Rule};

/// Returns true for files whose comments begin with `#`.
pub(super) fn has_hash_comments(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_configuration =
        [".sh", ".yaml", ".yml", ".toml"].iter().any(|extension| name.ends_with(extension));
    let is_named = ["Makefile", "CODEOWNERS"].contains(&name) || name.ends_with("Dockerfile");
    is_configuration || is_named || path.starts_with(".ci/")
}

/// Reports comments that are too wide, and blocks of comments that begin with a noun clause.
pub(super) fn check(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut is_inside_block = false;
    for (number, line) in (1..).zip(text.lines()) {
        let Some(comment) = line.trim_start().strip_prefix('#') else {
            is_inside_block = false;
            continue;
        };
        let mut report = |rule, message| {
            findings.push(Finding { rule, path: path.to_owned(), line: number, message });
        };
        let columns = line.chars().count();
        // A link cannot be wrapped, and neither can a command.
        if columns > WIDTH && !line.contains("://") && !comment.starts_with("   ") {
            report(Rule::CommentWidth, format!("{columns} columns; wrap the comment at {WIDTH}"));
        }
        let begins_block = !std::mem::replace(&mut is_inside_block, true);
        if let Some(clause) = noun_clause(comment).filter(|_| begins_block) {
            let first = comment.trim();
            let message = format!("begins with `{clause}`; say what it is or does: {first}");
            report(Rule::DocSentence, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comment_and_noun_clause_are_reported() {
        let wide = "word ".repeat(30);
        let text = format!(
            "# What it is for.\n# that is the second line\nkey: 1 # {wide}\n# {wide}\n#   {wide}\n"
        );
        let mut findings = Vec::new();
        check("a.yaml", &text, &mut findings);
        let found: Vec<_> = findings.iter().map(|finding| (finding.rule, finding.line)).collect();
        assert_eq!(found, [(Rule::DocSentence, 1), (Rule::CommentWidth, 4)]);
    }

    #[test]
    fn files_with_hash_comments_are_recognized() {
        for path in [".ci/run", "Makefile", "a/b.toml", "deploy/images/driver.Dockerfile"] {
            assert!(has_hash_comments(path), "{path}");
        }
        for path in ["README.md", "a/b.rs", "a/Makefile.in"] {
            assert!(!has_hash_comments(path), "{path}");
        }
    }
}
