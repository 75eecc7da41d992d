//! Exemptions of files from rules.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;

use crate::rules::{Finding, Rule};

/// Path of the list, relative to the root of the repository.
pub const PATH: &str = "testing/lint/allowed.txt";

/// Exemptions: a rule and the prefix of a path each, with the line that grants it.
#[derive(Debug, Default)]
pub struct Allowed(BTreeMap<(Rule, String), usize>);

impl Allowed {
    /// Reads the list of the repository at `root`.
    ///
    /// # Errors
    /// The list cannot be read or parsed.
    pub fn read(root: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(root.join(PATH))
            .with_context(|| format!("cannot read {PATH}"))?;
        Self::parse(&text)
    }

    /// Parses lines of `RULE PATH-PREFIX`; `#` begins a comment.
    ///
    /// # Errors
    /// A line has another form, names an unknown rule, or repeats one above.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let mut entries = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let (rule, path) = line.split_once(char::is_whitespace).with_context(|| {
                format!("{PATH}:{number}: expected `RULE PATH`, found `{line}`")
            })?;
            let rule = Rule::from_name(rule)
                .with_context(|| format!("{PATH}:{number}: unknown rule `{rule}`"))?;
            let previous = entries.insert((rule, path.trim().to_owned()), number);
            anyhow::ensure!(previous.is_none(), "{PATH}:{number}: listed twice: {line}");
        }
        Ok(Self(entries))
    }

    /// Removes findings of exempt files; adds one for each exemption that exempts nothing.
    #[must_use]
    pub fn apply(self, findings: Vec<Finding>) -> Vec<Finding> {
        let mut unused = self.0;
        let entries: Vec<(Rule, String)> = unused.keys().cloned().collect();
        let mut left = Vec::new();
        for finding in findings {
            let mut is_exempt = false;
            for entry in &entries {
                if entry.0 == finding.rule && finding.path.starts_with(&entry.1) {
                    unused.remove(entry);
                    is_exempt = true;
                }
            }
            if !is_exempt {
                left.push(finding);
            }
        }
        left.extend(unused.into_iter().map(|((rule, path), line)| Finding {
            rule: Rule::StaleExemption,
            path: PATH.to_owned(),
            line,
            message: format!("no finding of {} in {path}: remove the line", rule.name()),
        }));
        left
    }
}
