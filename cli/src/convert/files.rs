//! The files of `convert`: named ones, those of directories, and the standard input.

use std::path::{Path, PathBuf};

use super::ManifestFile;

/// Error returned when a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file or directory cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A directory without manifests.
    #[error("{}: no file ends in .yaml, .yml or .json{hint}", path.display())]
    NoManifests {
        /// The directory.
        path: PathBuf,
        /// The next step.
        hint: &'static str,
    },
}

impl ManifestFile {
    /// Reads files. A directory stands for its manifests, with those of its subdirectories if
    /// `recursive`; `-` stands for the standard input.
    ///
    /// # Errors
    /// [`FileError`] for the first file that cannot be read.
    pub fn read_all(paths: &[PathBuf], recursive: bool) -> Result<Vec<Self>, FileError> {
        let mut files = Vec::new();
        for path in paths {
            if path.is_dir() {
                let before = files.len();
                read_directory(path, recursive, &mut files)?;
                if files.len() == before {
                    let hint = if recursive { "" } else { "; --recursive reads subdirectories" };
                    return Err(FileError::NoManifests { path: path.clone(), hint });
                }
            } else {
                files.push(read(path)?);
            }
        }
        Ok(files)
    }
}

fn read(path: &Path) -> Result<ManifestFile, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let text = crate::input::read(path).map_err(failed)?;
    Ok(ManifestFile { name: path.display().to_string(), text })
}

fn read_directory(
    directory: &Path,
    recursive: bool,
    files: &mut Vec<ManifestFile>,
) -> Result<(), FileError> {
    let failed = |source| FileError::Read { path: directory.to_owned(), source };
    let entries = std::fs::read_dir(directory).map_err(failed)?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(failed)?.path());
    }
    paths.sort();
    for path in paths {
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() && recursive {
            read_directory(&path, recursive, files)?;
        } else if path.is_file() && matches!(extension, Some("yaml" | "yml" | "json")) {
            files.push(read(&path)?);
        }
    }
    Ok(())
}
