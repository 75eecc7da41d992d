//! Status of a daemon, as the supervisor publishes it.

use std::{fs, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use tessera_api::names::GpuUuid;
use tessera_runtime::atomic_file;

use crate::layout::MpsPaths;

/// State of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MpsDaemonState {
    /// The daemon has not answered yet.
    Starting,
    /// The daemon answers and serves clients.
    Ready,
    /// The daemon is not running. It is restarted, unless the supervisor stops.
    Failed,
}

/// Content of `status.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsDaemonStatus {
    /// State of the daemon.
    pub state: MpsDaemonState,
    /// Reason in plain text, if the daemon failed now or before this start. Empty while it is
    /// ready.
    pub message: String,
    /// Number of starts since the directory was created, by all supervisors. Failed attempts
    /// count.
    pub starts: u64,
}

/// Error of a read or write of a status.
#[derive(Debug, thiserror::Error)]
pub enum MpsDaemonStatusError {
    /// The file cannot be read or written.
    #[error("cannot {operation} `{path}`", path = .path.display())]
    Io {
        /// Operation that failed.
        operation: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file is not a valid status.
    #[error("invalid MPS daemon status `{path}`", path = .path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Error of the parser.
        source: serde_json::Error,
    },
}

impl MpsDaemonStatus {
    /// Returns the status of a GPU's daemon, or `None` if the supervisor has not written one.
    ///
    /// # Errors
    /// Returns [`MpsDaemonStatusError`] if the file cannot be read or parsed.
    pub fn read(paths: &MpsPaths, gpu: &GpuUuid) -> Result<Option<Self>, MpsDaemonStatusError> {
        let path = paths.status(gpu);
        match fs::read(&path) {
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(status) => Ok(Some(status)),
                Err(source) => Err(MpsDaemonStatusError::Malformed { path, source }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(MpsDaemonStatusError::Io { operation: "read", path, source }),
        }
    }

    /// Replaces the status file atomically.
    ///
    /// # Errors
    /// Returns [`MpsDaemonStatusError`] if the file cannot be written.
    pub fn write(&self, paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), MpsDaemonStatusError> {
        let path = paths.status(gpu);
        let text = serde_json::to_vec(self).expect("invariant: a status is plain data");
        atomic_file::write(&path, &text, 0o644).map_err(|source| MpsDaemonStatusError::Io {
            operation: "write",
            path,
            source,
        })
    }

    /// Removes the status file.
    ///
    /// # Errors
    /// Returns [`MpsDaemonStatusError`] if the file cannot be removed.
    pub fn remove(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), MpsDaemonStatusError> {
        let path = paths.status(gpu);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(MpsDaemonStatusError::Io { operation: "remove", path, source })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_round_trips() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        assert_eq!(MpsDaemonStatus::read(&paths, &gpu).expect("nothing yet"), None);
        fs::create_dir_all(paths.daemon(&gpu)).expect("made");
        let status = MpsDaemonStatus {
            state: MpsDaemonState::Failed,
            message: "exited".to_owned(),
            starts: 3,
        };
        status.write(&paths, &gpu).expect("written");
        let text = fs::read_to_string(paths.status(&gpu)).expect("readable");
        assert_eq!(text, r#"{"state":"Failed","message":"exited","starts":3}"#);
        assert_eq!(MpsDaemonStatus::read(&paths, &gpu).expect("readable"), Some(status));
        assert_eq!(
            fs::read_dir(paths.daemon(&gpu)).expect("there").count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn invalid_status_error_names_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        fs::create_dir_all(paths.daemon(&gpu)).expect("made");
        fs::write(paths.status(&gpu), "{").expect("written");
        let error = MpsDaemonStatus::read(&paths, &gpu).expect_err("malformed").to_string();
        assert!(error.contains("status.json"), "{error}");
    }
}
