//! The files of the repository.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

/// Returns the paths of the files that git tracks or would track, relative to `root`, sorted.
///
/// # Errors
/// `git` cannot be run, `root` is not a repository, or there are no files in it.
pub fn tracked_files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot run git")?;
    anyhow::ensure!(
        output.status.success(),
        "git ls-files failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let names = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    let is_file = |name: &&str| !name.is_empty() && root.join(name).is_file();
    let mut files: Vec<String> = names.split('\0').filter(is_file).map(str::to_owned).collect();
    anyhow::ensure!(!files.is_empty(), "no tracked files in {}", root.display());
    files.sort();
    files.dedup();
    Ok(files)
}
