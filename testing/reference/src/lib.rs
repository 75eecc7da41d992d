//! Generates the pages of `docs/reference` from the code that they describe.
//!
//! A test fails when a page differs from the code; `make reference` writes the pages anew.

#![forbid(unsafe_code)]

mod chart_values;
mod command_lines;
mod dialects;
mod interface;
mod table;

use std::path::Path;

use anyhow::Context as _;

/// One generated page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Path, relative to the root of the repository.
    pub path: &'static str,
    /// Markdown.
    pub text: String,
}

impl Page {
    /// Writes the page below the repository's root.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, root: &Path) -> anyhow::Result<()> {
        let path = root.join(self.path);
        let directory = path.parent().context("a page is in a directory")?;
        std::fs::create_dir_all(directory)
            .and_then(|()| std::fs::write(&path, &self.text))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Returns the page as it is in the repository at `root`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn current(&self, root: &Path) -> anyhow::Result<String> {
        std::fs::read_to_string(root.join(self.path))
            .with_context(|| format!("cannot read {}; run: make reference", self.path))
    }
}

/// Returns all pages.
///
/// # Errors
/// The chart's values cannot be read.
pub fn pages(root: &Path) -> anyhow::Result<Vec<Page>> {
    Ok(vec![
        interface::events(),
        interface::metrics(),
        interface::config(),
        interface::attributes(),
        interface::exit_codes(),
        dialects::dialects(),
        command_lines::flags(),
        chart_values::chart_values(root)?,
    ])
}
