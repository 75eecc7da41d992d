//! Log file `control.log`.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    process,
};

use jiff::Timestamp;

/// The daemon's log.
#[derive(Debug)]
pub(crate) struct Log(File);

impl Log {
    /// Opens the log of a directory for appending; creates both if they do not exist.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        File::options().create(true).append(true).open(directory.join("control.log")).map(Self)
    }

    /// Appends a line. Write errors are ignored, because nothing depends on the log.
    pub(crate) fn line(&self, text: &str) {
        let now = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S%.3f");
        // One write, so that lines of several threads do not mix.
        let _ =
            (&self.0).write_all(format!("[{now} Control {}] {text}\n", process::id()).as_bytes());
    }
}
