//! `tessera-lint`: part of `make lint`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser as _;
use tessera_lint::{allowed, repository, rules};

/// Checks the words of this repository: doc comments, names, banned words, widths.
///
/// Prints one line for each finding, `FILE:LINE: RULE: what is wrong`, and exits with 1. Rules and
/// their reasons: docs/contributing/style.md. Files that are exempt from a rule are listed in
/// testing/lint/allowed.txt; an exemption that nothing needs is a finding as well.
#[derive(clap::Parser)]
struct LintArgs {
    /// Root of the repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// Shows the findings of exempt files as well, and ignores exemptions.
    #[arg(long)]
    all: bool,
    /// Checks only files whose paths begin with this.
    #[arg(value_name = "PATH")]
    only: Vec<String>,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = LintArgs::parse();
    let files = repository::tracked_files(&args.root)?;
    let findings = rules::check(&args.root, &files)?;
    let mut findings =
        if args.all { findings } else { allowed::Allowed::read(&args.root)?.apply(findings) };
    if !args.only.is_empty() {
        findings.retain(|finding| args.only.iter().any(|path| finding.path.starts_with(path)));
    }
    for finding in &findings {
        println!("{finding}");
    }
    eprintln!("{} files, {} findings", files.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
