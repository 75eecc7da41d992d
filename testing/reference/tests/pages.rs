//! Holds docs/reference to the code.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn generated_pages_are_current() {
    for page in tessera_reference::pages(&root()).unwrap() {
        let current = page.current(&root()).unwrap();
        assert!(current == page.text, "{} is not current; run: make reference", page.path);
    }
}
