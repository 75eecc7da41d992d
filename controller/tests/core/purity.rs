//! The core names no runtime, no client, no clock and no random numbers.

use std::fs;
use std::path::{Path, PathBuf};

/// Words that the source of the core must not have.
const FORBIDDEN: [&str; 9] = [
    "tokio::",
    "kube::",
    "uuid::",
    "Instant",
    "SystemTime",
    "Timestamp::now",
    "std::fs",
    "std::thread",
    "prometheus_client",
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.collect()
}

#[test]
fn core_has_no_runtime_client_clock_or_random_numbers() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = sources(&source.join("core"));
    files.push(source.join("core.rs"));
    assert!(files.len() > 15, "the core is elsewhere: {files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            let found = FORBIDDEN.iter().find(|word| line.contains(**word));
            assert_eq!(found, None, "{}: {line}", file.display());
        }
    }
}
