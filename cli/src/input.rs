//! Text of a file or of the standard input.

use std::io::{self, Read as _};
use std::path::Path;

/// Returns the text of a file; `-` stands for the standard input.
///
/// # Errors
/// The file cannot be read, or is not UTF-8.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}
