//! The settings file of the dialects.

use std::path::{Path, PathBuf};

use tessera_dialect::{Converter, Settings, SettingsError};

/// Errors of the settings file.
#[derive(Debug, thiserror::Error)]
pub enum SettingsFileError {
    /// The file cannot be read.
    #[error("cannot read --dialects {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is not YAML, or has an unknown field.
    #[error("--dialects {}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The problem, with line and column.
        problem: String,
    },
    /// The settings contradict one another.
    #[error("--dialects {}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The first contradiction.
        #[source]
        source: SettingsError,
    },
}

/// Reads the settings file.
///
/// # Errors
/// [`SettingsFileError`], with the field.
pub fn read(path: &Path) -> Result<Converter, SettingsFileError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| SettingsFileError::Unreadable { path: path.to_owned(), source })?;
    let settings: Settings = serde_saphyr::from_str(&text).map_err(|error| {
        SettingsFileError::Malformed { path: path.to_owned(), problem: error.to_string() }
    })?;
    Converter::new(settings)
        .map_err(|source| SettingsFileError::Invalid { path: path.to_owned(), source })
}
