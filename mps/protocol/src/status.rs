//! How a daemon is, as the keeper says it.

use std::{fs, io, path::PathBuf};

use serde::{Deserialize, Serialize};
use tessera_api::names::GpuUuid;
use tessera_runtime::atomic_file;

use crate::layout::MpsPaths;

/// How a daemon is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It has not answered yet.
    Starting,
    /// It answers: clients may come.
    Ready,
    /// It does not run; unless the keeper stops, it is tried again.
    Failed,
}

/// The content of `status.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// How the daemon is.
    pub state: State,
    /// Why, for people: of a daemon that fails, or did before this start. Empty while it is ready.
    pub message: String,
    /// How often it was started since its directory was made, by this keeper and by earlier ones;
    /// failed attempts count.
    pub starts: u64,
}

/// Why nothing is known of a daemon.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// The file cannot be read or written.
    #[error("failed to {operation} `{path}`", path = .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// It is no status.
    #[error("`{path}` is no status of a daemon", path = .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl Status {
    /// How the daemon of a GPU is; `None` where the keeper has said nothing yet.
    ///
    /// # Errors
    /// [`StatusError`].
    pub fn read(paths: &MpsPaths, gpu: &GpuUuid) -> Result<Option<Self>, StatusError> {
        let path = paths.status(gpu);
        match fs::read(&path) {
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(status) => Ok(Some(status)),
                Err(source) => Err(StatusError::Malformed { path, source }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(StatusError::Io { operation: "read", path, source }),
        }
    }

    /// Says it, so that whoever reads sees this or what was said before.
    pub fn write(&self, paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), StatusError> {
        let path = paths.status(gpu);
        let text = serde_json::to_vec(self).expect("invariant: a status is plain data");
        atomic_file::write(&path, &text, 0o644).map_err(|source| StatusError::Io {
            operation: "write",
            path,
            source,
        })
    }

    /// Says nothing any more.
    pub fn remove(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), StatusError> {
        let path = paths.status(gpu);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(StatusError::Io { operation: "remove", path, source })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_reads_as_it_is_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        assert_eq!(Status::read(&paths, &gpu).expect("nothing yet"), None);
        fs::create_dir_all(paths.daemon(&gpu)).expect("made");
        let status = Status { state: State::Failed, message: "it ended".to_owned(), starts: 3 };
        status.write(&paths, &gpu).expect("written");
        let text = fs::read_to_string(paths.status(&gpu)).expect("readable");
        assert_eq!(text, r#"{"state":"Failed","message":"it ended","starts":3}"#);
        assert_eq!(Status::read(&paths, &gpu).expect("readable"), Some(status));
        assert_eq!(
            fs::read_dir(paths.daemon(&gpu)).expect("there").count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn what_is_no_status_is_an_error_that_names_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        fs::create_dir_all(paths.daemon(&gpu)).expect("made");
        fs::write(paths.status(&gpu), "{").expect("written");
        let error = Status::read(&paths, &gpu).expect_err("malformed").to_string();
        assert!(error.contains("status.json"), "{error}");
    }
}
