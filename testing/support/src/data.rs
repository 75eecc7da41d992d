//! Access to the files of `testing/data`, which `testing/data/README.md` describes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the directory `testing/data` of the repository.
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("data")
}

/// Reads a text file of `testing/data`.
///
/// # Panics
/// Panics if the file is missing, empty or not UTF-8.
pub fn read(file: impl AsRef<Path>) -> String {
    read_from(&directory(), file.as_ref())
}

fn read_from(directory: &Path, file: &Path) -> String {
    let path = directory.join(file);
    let text = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read test data {}: {error}", path.display()));
    assert!(!text.trim().is_empty(), "test data is empty: {}", path.display());
    text
}

/// Golden cases of one profile of the conformance suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GoldenProfile {
    /// Profile of the oracle's generator, or `traps` for the hand-made cases.
    pub name: String,
    /// Cases, one JSON object each.
    pub cases: Vec<String>,
}

/// Reads the golden cases of `testing/data/conformance` that its `manifest.tsv` lists.
///
/// # Panics
/// Panics if a file is missing, has another number of cases than in the manifest, or is not in the
/// manifest.
pub fn golden_profiles() -> Vec<GoldenProfile> {
    golden_profiles_of(&directory().join("conformance"))
}

fn golden_profiles_of(directory: &Path) -> Vec<GoldenProfile> {
    let manifest = read_from(directory, Path::new("manifest.tsv"));
    let profile = |line: &str| {
        let (name, count) = line.split_once('\t').expect("manifest.tsv: PROFILE<TAB>CASES");
        let count: usize = count.parse().expect("manifest.tsv: CASES is a number");
        let file = format!("{name}.jsonl");
        let cases: Vec<String> =
            read_from(directory, Path::new(&file)).lines().map(str::to_owned).collect();
        assert_eq!(cases.len(), count, "cases of {}", directory.join(file).display());
        GoldenProfile { name: name.to_owned(), cases }
    };
    let profiles: Vec<GoldenProfile> = manifest.lines().map(profile).collect();
    let listed: BTreeSet<String> =
        profiles.iter().map(|profile| format!("{}.jsonl", profile.name)).collect();
    let entries = fs::read_dir(directory).expect("the directory is readable");
    let names =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    let stored: BTreeSet<String> = names.filter(|name| name.ends_with(".jsonl")).collect();
    assert_eq!(stored, listed, "files of cases in {} and its manifest.tsv", directory.display());
    profiles
}

/// A query of `cuGetProcAddress`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcQuery {
    /// Function name without version suffix; empty in the first query of a runtime.
    pub name: String,
    /// Requested CUDA version, such as `12090`.
    pub version: u32,
    /// Value of `cuuint64_t flags`.
    pub flags: u64,
}

/// Reads the queries of NVIDIA's CUDA runtime 12.9 at the first use by a program, in order.
///
/// # Panics
/// Panics if the file is missing or does not have 419 queries.
pub fn proc_queries() -> Vec<ProcQuery> {
    let query = |line: &str| {
        let (name, rest) = line.split_once(' ').expect("a name, maybe empty");
        let (version, flags) = rest.split_once(" fl=").expect("a version and flags");
        let [version, flags] =
            [version, flags].map(|number| number.parse::<u64>().expect("a number"));
        ProcQuery {
            name: name.to_owned(),
            version: version.try_into().expect("a CUDA version"),
            flags,
        }
    };
    let queries: Vec<ProcQuery> =
        read("symbols/cudart-12.9-proc-queries.txt").lines().map(query).collect();
    assert_eq!(queries.len(), 419, "queries of the CUDA runtime");
    queries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            fs::write(directory.path().join(name), text).expect("written");
        }
        directory
    }

    #[test]
    fn reads_golden_cases_of_manifest() {
        let suite =
            suite(&[("manifest.tsv", "all\t2\n"), ("all.jsonl", "{}\n{}\n"), ("README.md", "x")]);
        let all = GoldenProfile { name: "all".into(), cases: vec!["{}".into(); 2] };
        assert_eq!(golden_profiles_of(suite.path()), [all]);
    }

    #[test]
    #[should_panic(expected = "cannot read test data")]
    fn panics_on_missing_manifest() {
        golden_profiles_of(suite(&[("all.jsonl", "{}\n")]).path());
    }

    #[test]
    #[should_panic(expected = "test data is empty")]
    fn panics_on_empty_manifest() {
        golden_profiles_of(suite(&[("manifest.tsv", "\n")]).path());
    }

    #[test]
    #[should_panic(expected = "cannot read test data")]
    fn panics_on_missing_file_of_manifest() {
        golden_profiles_of(suite(&[("manifest.tsv", "all\t2\n")]).path());
    }

    #[test]
    #[should_panic(expected = "cases of")]
    fn panics_on_truncated_file() {
        golden_profiles_of(suite(&[("manifest.tsv", "all\t2\n"), ("all.jsonl", "{}\n")]).path());
    }

    #[test]
    #[should_panic(expected = "and its manifest.tsv")]
    fn panics_on_file_not_in_manifest() {
        let files = [("manifest.tsv", "all\t1\n"), ("all.jsonl", "{}\n"), ("new.jsonl", "{}\n")];
        golden_profiles_of(suite(&files).path());
    }
}
