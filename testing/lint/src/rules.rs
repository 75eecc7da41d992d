//! The rules, and the findings they report.

mod comments;
mod hash_comments;
mod items;
mod markdown;
mod words;

use std::fmt;
use std::path::Path;

use anyhow::Context as _;

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// The first sentence of a doc comment, or of a comment that begins with `#`, is a noun clause,
    /// such as "What a pod asks for".
    DocSentence,
    /// A word that the field does not use.
    BannedWord,
    /// The name of a test is longer than 70 characters.
    TestName,
    /// A predicate (`is_`, `has_`, `can_`) takes `&mut self`.
    Predicate,
    /// A public type's name says nothing.
    VagueType,
    /// Two shipped crates have a public type of one name.
    AmbiguousType,
    /// A comment is wider than 100 columns.
    CommentWidth,
    /// A paragraph of Markdown is wider than 100 columns.
    MarkdownWidth,
    /// A function is longer than 100 lines.
    FunctionLength,
    /// A file of a shipped crate is longer than 600 lines.
    FileLength,
    /// An exemption that nothing needs.
    StaleExemption,
}

impl Rule {
    const ALL: [Self; 11] = [
        Self::DocSentence,
        Self::BannedWord,
        Self::TestName,
        Self::Predicate,
        Self::VagueType,
        Self::AmbiguousType,
        Self::CommentWidth,
        Self::MarkdownWidth,
        Self::FunctionLength,
        Self::FileLength,
        Self::StaleExemption,
    ];

    /// Returns the rule's name as findings and the list of exemptions write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DocSentence => "doc-sentence",
            Self::BannedWord => "banned-word",
            Self::TestName => "test-name",
            Self::Predicate => "predicate",
            Self::VagueType => "vague-type",
            Self::AmbiguousType => "ambiguous-type",
            Self::CommentWidth => "comment-width",
            Self::MarkdownWidth => "markdown-width",
            Self::FunctionLength => "function-length",
            Self::FileLength => "file-length",
            Self::StaleExemption => "stale-exemption",
        }
    }

    /// Returns the rule of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }
}

/// One place that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// Path of the file, relative to the root of the repository.
    pub path: String,
    /// Line of the file, from 1.
    pub line: usize,
    /// The fault, and the fix.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, path, line, message } = self;
        write!(f, "{path}:{line}: {}: {message}", rule.name())
    }
}

/// Checks all files.
///
/// # Errors
/// A file cannot be read or parsed, or there is no Rust file or no Markdown file among `files`.
pub fn check(root: &Path, files: &[String]) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut types = items::PublicTypes::default();
    let (mut sources, mut documents) = (0, 0);
    for path in files {
        let is_rust = path.ends_with(".rs");
        let is_markdown = path.ends_with(".md");
        let is_script = hash_comments::has_hash_comments(path);
        if !(is_rust || is_markdown || is_script) || is_data(path) {
            continue;
        }
        let text = std::fs::read_to_string(root.join(path))
            .with_context(|| format!("cannot read {path}"))?;
        if is_rust {
            sources += 1;
            let file = syn::parse_file(&text).with_context(|| format!("cannot parse {path}"))?;
            items::check(path, &text, &file, &mut types, &mut findings);
            comments::check(path, &text, &mut findings)?;
        }
        if is_markdown {
            documents += 1;
            markdown::check(path, &text, &mut findings);
        }
        if is_script {
            hash_comments::check(path, &text, &mut findings);
        }
        if !lists_banned_words(path) {
            words::check(path, &text, &mut findings);
        }
    }
    anyhow::ensure!(sources > 0 && documents > 0, "no Rust or no Markdown files to check");
    types.report(&mut findings);
    findings.sort_by(|a, b| (&a.path, a.line, a.rule).cmp(&(&b.path, b.line, b.rule)));
    Ok(findings)
}

/// Returns true for inputs of tests, which keep the words of their origin.
fn is_data(path: &str) -> bool {
    path.starts_with("testing/data/") || path.contains("/snapshots/")
}

/// Returns true for files that name banned words to say what to use instead.
fn lists_banned_words(path: &str) -> bool {
    path.starts_with("testing/lint/")
        || path == "docs/reference/glossary.md"
        || path == "docs/contributing/style.md"
}
