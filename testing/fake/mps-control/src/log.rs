//! `control.log`, line by line.

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
    /// Goes on with the log of a directory, which is made if need be.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        File::options().create(true).append(true).open(directory.join("control.log")).map(Self)
    }

    /// Adds a line. What cannot be written is lost: the log is for people.
    pub(crate) fn line(&self, text: &str) {
        let now = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S%.3f");
        // In one go, so that lines of several threads do not mix.
        let _ =
            (&self.0).write_all(format!("[{now} Control {}] {text}\n", process::id()).as_bytes());
    }
}
