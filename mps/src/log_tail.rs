//! Tail of a daemon's log, for failure messages.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

const LINES: usize = 10;
const BYTES: u64 = 1024;

/// Returns the last lines of a file, or an empty string if it cannot be read.
pub(crate) fn read(log: &Path) -> String {
    last_bytes(log).map(|(bytes, cut)| lines(&bytes, cut)).unwrap_or_default()
}

/// Returns the last bytes, and true if the file is longer.
fn last_bytes(log: &Path) -> io::Result<(Vec<u8>, bool)> {
    let mut file = File::open(log)?;
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(length.saturating_sub(BYTES)))?;
    let mut bytes = Vec::new();
    file.take(BYTES).read_to_end(&mut bytes)?;
    Ok((bytes, length > BYTES))
}

fn lines(bytes: &[u8], cut: bool) -> String {
    let text = String::from_utf8_lossy(bytes);
    // The first line may be incomplete.
    let whole = if cut { text.split_once('\n').map_or(&*text, |(_, rest)| rest) } else { &*text };
    let lines: Vec<_> = whole.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_at_most_ten_lines_and_one_kibibyte() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("control.log");
        assert_eq!(read(&log), "");
        let write = |lines: &[String]| std::fs::write(&log, lines.join("\n")).expect("written");
        write(&(0..30).map(|line| line.to_string()).collect::<Vec<_>>());
        assert_eq!(
            read(&log),
            (20..30).map(|line| line.to_string()).collect::<Vec<_>>().join("\n")
        );
        write(&(0..30).map(|line| format!("{line} {}", "x".repeat(300))).collect::<Vec<_>>());
        let read = read(&log);
        assert!(
            read.len() <= 1024 && read.starts_with("27 ") && read.lines().count() == 3,
            "{read}"
        );
    }
}
